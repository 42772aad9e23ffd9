"""Policies by name; a policy of the user's own is named by its import path (``module:Class``)."""

from __future__ import annotations

import importlib
import inspect
from typing import Any

from hybridattn.core.errors import HybridAttnError, InputError
from hybridattn.cost.costs import Costs
from hybridattn.policies.adaptive import Adaptive, Auto
from hybridattn.policies.asymmetric import Asymmetric
from hybridattn.policies.base import Policy
from hybridattn.policies.fixed import AsyncOverlap, CpuOnly, FixedFraction, GpuOnly, SyncOffload
from hybridattn.policies.planning import AsyncChooser, Predict
from hybridattn.policies.renamed import OPTIONS
from hybridattn.policies.split import Split

POLICIES: dict[str, type[Policy]] = {
    p.name: p for p in (GpuOnly, CpuOnly, SyncOffload, FixedFraction, AsyncOverlap, Asymmetric, Split, Adaptive, Auto)
}


def make_policy(
    policy: str | Policy, costs: Costs | None = None, predict: Predict | AsyncChooser | None = None, **options: Any
) -> Policy:
    """A policy from its name, from ``package.module:Class``, or as it is.

    Parameters
    ----------
    costs, predict : optional
        The cost model, and a way to try layouts on it; given to the policies that use them, ignored by the others.

    Raises
    ------
    InputError
        Unknown name, or an option that this policy does not have.
    """
    if isinstance(policy, Policy):
        return policy
    cls = policy_class(policy)
    known = inspect.signature(cls).parameters
    for option in options:
        if OPTIONS.get(option) in known:
            raise InputError(f"policy '{policy}': option '{option}' is called '{OPTIONS[option]}' now")
        if option not in known:
            raise InputError(f"policy '{policy}' has no option '{option}'; it has {', '.join(known) or 'none'}")
    given = {"costs": costs, "predict": predict}
    options |= {name: value for name, value in given.items() if value is not None and name in known}
    try:
        return cls(**options)
    except HybridAttnError:
        raise
    except Exception as error:  # somebody's class
        raise InputError(f"policy '{policy}' cannot be made: {type(error).__name__}: {error}") from error


def policy_class(name: str) -> type[Policy]:
    """The class behind a policy's name or import path; InputError when there is none."""
    return POLICIES.get(name) or _imported(name)


def _imported(path: str) -> type[Policy]:
    module, _, name = path.partition(":")
    if not name:
        raise InputError(
            f"policy '{path}' is unknown; choose one of {', '.join(sorted(POLICIES))} or name one as module:Class"
        )
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InputError(f"policy '{path}' cannot be imported: {error}") from error
    except HybridAttnError:
        raise
    except Exception as error:  # somebody's module, or no name of one
        raise InputError(f"policy '{path}' cannot be imported: {type(error).__name__}: {error}") from error
    if not (isinstance(found, type) and issubclass(found, Policy)):
        raise InputError(f"policy '{path}' is not a subclass of hybridattn.policies.base.Policy")
    return found
