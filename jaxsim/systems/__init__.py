"""Mechanisms, one file each."""

from jaxsim.systems.bouncing_ball import BallOnTable, BouncingBall
from jaxsim.systems.double_pendulum import DoublePendulum
from jaxsim.systems.impact_oscillator import ImpactOscillator
from jaxsim.systems.newtons_cradle import NewtonsCradle
from jaxsim.systems.rocking_block import RockingBlock
from jaxsim.systems.slider_crank import IdealSliderCrank, SliderCrank
from jaxsim.systems.sliding_block import SlidingBlock

__all__ = [
    "BallOnTable",
    "BouncingBall",
    "DoublePendulum",
    "IdealSliderCrank",
    "ImpactOscillator",
    "NewtonsCradle",
    "RockingBlock",
    "SliderCrank",
    "SlidingBlock",
]
