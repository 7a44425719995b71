"""jaxsim: mechanisms with impacts and contact, batched and differentiable, in JAX."""

from jaxsim import contact, plot, schemes, systems
from jaxsim.schemes import EventDriven, GearGuptaLeimkuhler, Moreau
from jaxsim.sensitivity import gradient_check
from jaxsim.simulate import simulate
from jaxsim.system import mechanism
from jaxsim.trajectory import SimulationError, Trajectory
from jaxsim.tune import tune_cpu

__all__ = [
    "EventDriven",
    "GearGuptaLeimkuhler",
    "Moreau",
    "SimulationError",
    "Trajectory",
    "contact",
    "gradient_check",
    "mechanism",
    "plot",
    "schemes",
    "simulate",
    "systems",
    "tune_cpu",
]
