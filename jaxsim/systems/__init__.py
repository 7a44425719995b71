"""Mechanisms, one file each."""

from jaxsim.systems.slider_crank import IdealSliderCrank, SliderCrank

__all__ = ["IdealSliderCrank", "SliderCrank"]
