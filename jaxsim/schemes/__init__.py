"""Time-stepping schemes: `step(system, state, t, dt) -> (state, info)`, one file each."""

from jaxsim.schemes.decoupled import DecoupledGearGuptaLeimkuhler
from jaxsim.schemes.event import EventDriven
from jaxsim.schemes.ggl import GearGuptaLeimkuhler
from jaxsim.schemes.moreau import Moreau
from jaxsim.schemes.state import ImpactLog, State, StepInfo

__all__ = [
    "DecoupledGearGuptaLeimkuhler",
    "EventDriven",
    "GearGuptaLeimkuhler",
    "ImpactLog",
    "Moreau",
    "State",
    "StepInfo",
]
