"""Time-stepping schemes: `step(system, state, t, dt) -> (state, info)`, one file each."""

from jaxsim.schemes.decoupled import DecoupledGearGuptaLeimkuhler
from jaxsim.schemes.ggl import GearGuptaLeimkuhler
from jaxsim.schemes.moreau import Moreau
from jaxsim.schemes.state import State, StepInfo

__all__ = ["DecoupledGearGuptaLeimkuhler", "GearGuptaLeimkuhler", "Moreau", "State", "StepInfo"]
