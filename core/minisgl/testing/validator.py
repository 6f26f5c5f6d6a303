"""The plan validator, beside the other test tools."""

from minisgl.sched.validator import PlanValidator

__all__ = ["PlanValidator"]
