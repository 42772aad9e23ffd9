"""What had another name in earlier versions: a policy file or an option of a user's own is told the new one."""

from __future__ import annotations

OPTIONS = {
    "patience_us": "max_wait_us",
    "max_cohorts": "max_micro_batches",
    "cohorts": "micro_batches",
    "same_pass": "same_step",
    "plan_passes": "plan_steps",
}
MEMBERS = {
    "launch": "dispatch",
    "launch_cap": "dispatch_cap",
    "patience_ns": "max_wait_ns",
    "rests": "no_detour",
    "quiet_until_ns": "next_detour_ns",
    "detours_wait": "the answer Decision.DETOUR of ask",
}
NAMES = {
    "Verb": "Decision",
    "LaunchView": "DispatchView",
    "CohortView": "MicroBatchView",
    "PassView": "StepView",
}
