"""The policy of an LLM: made at once, or once the model is known where it decides by a cost model."""

from __future__ import annotations

import inspect
import warnings
from pathlib import Path
from typing import Any

from hybridattn.core.errors import InputError
from hybridattn.core.params import NoEffectWarning
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.here import costs_here, profile_here
from hybridattn.cost.profile import Profile
from hybridattn.planning.layout_table import table_path
from hybridattn.planning.messages import Setup
from hybridattn.planning.planner import Planner
from hybridattn.policies.base import Policy
from hybridattn.policies.registry import make_policy, policy_class


class PolicyChoice:
    """A policy by name or as it is, its options, and the profile that prices its decisions.

    A policy that plans needs a profile: the one of this machine unless another is given. One that can do without a cost
    model gets one only where a profile is given.
    """

    def __init__(self, policy: Any, options: dict[str, Any], profile: str | Path | Profile | None) -> None:
        if not isinstance(policy, str | Policy):
            raise InputError(f"policy must be a name or a Policy, got {policy!r}")
        if isinstance(policy, Policy) and options:
            raise InputError(
                f"{' and '.join(options)} cannot act on policy '{policy.name}', which is made already: give its class "
                "what it should do when you make it"
            )
        self._policy, self._options = policy, options
        known = {} if isinstance(policy, Policy) else inspect.signature(policy_class(policy)).parameters
        self._plans = "predict" in known
        must = "costs" in known and known["costs"].default is inspect.Parameter.empty
        priced = self._plans or must or ("costs" in known and profile is not None)
        self._profile: Profile | None = None
        if priced:
            try:
                self._profile = profile_here(profile)
            except InputError as error:
                raise InputError(f"policy '{policy}' decides by a cost model, and {error}") from error
        elif profile is not None:
            name = policy.name if isinstance(policy, Policy) else policy
            warnings.warn(f"policy '{name}' reads no profile: it has no effect", NoEffectWarning, stacklevel=3)
        self._made = None if priced else make_policy(policy, **options)

    def make(self, shape: ModelShape, dtype: str, kv_dtype: str, fingerprint: str) -> tuple[Policy, Planner | None]:
        """The policy, and what plans for it, which the caller closes."""
        if self._profile is None:
            assert self._made is not None
            return self._made, None
        try:
            costs = costs_here(self._profile, shape, dtype, kv_dtype, fingerprint)
        except InputError as error:
            raise InputError(f"policy '{self._policy}' decides by a cost model, and {error}") from error
        if not self._plans:
            return make_policy(self._policy, costs, **self._options), None
        planner = Planner(self._profile, shape, dtype, table=table_path(Setup(self._profile, shape, dtype)))
        try:
            return make_policy(self._policy, costs, planner, **self._options), planner
        except BaseException:
            planner.close()
            raise
