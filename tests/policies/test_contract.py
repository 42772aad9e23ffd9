"""What a policy class must declare, what old names are told, and wrappers."""

from __future__ import annotations

import importlib

import pytest

from hybridattn.core.errors import InputError
from hybridattn.policies import base
from hybridattn.policies.base import HOOKS, Policy
from hybridattn.policies.delegate import Delegate, Wrapper
from hybridattn.policies.fixed import AsyncOverlap, GpuOnly
from hybridattn.policies.registry import POLICIES, make_policy
from hybridattn.policies.renamed import MEMBERS, NAMES, OPTIONS


@pytest.mark.parametrize("hook", sorted(HOOKS))
def test_a_hook_that_is_not_declared_is_refused_where_it_is_defined(hook):
    """It would never be called, and nobody would notice."""
    with pytest.raises(InputError, match=rf"policy class Mine defines {hook}\(\), .* add '{hook}' to its hooks"):
        type("Mine", (Policy,), {hook: lambda self, *args: None})
    assert type("Mine", (Policy,), {hook: lambda self, *args: None, "hooks": frozenset({hook})}).hooks == {hook}


def test_an_unknown_hook_is_refused():
    with pytest.raises(InputError, match="policy class Mine: hook 'launch' is none of begin, cold_pages, detour"):
        type("Mine", (Policy,), {"hooks": frozenset({"launch"})})


@pytest.mark.parametrize("hooks", [None, "detour", ["detour"]])
def test_hooks_that_are_no_set_are_refused(hooks):
    with pytest.raises(InputError, match="policy class Mine: hooks must be a set of names, got "):
        type("Mine", (Policy,), {"hooks": hooks})


def test_hooks_are_inherited():
    assert type("Mine", (POLICIES["cpu_only"],), {"detour": lambda self, micro_batches, at: None}).hooks == {"detour"}


@pytest.mark.parametrize(("old", "new"), MEMBERS.items())
def test_a_method_or_attribute_of_an_earlier_version_is_told_its_new_name(old, new):
    with pytest.raises(InputError, match=f"policy class Mine: '{old}' is {new} now"):
        type("Mine", (Policy,), {old: None})
    assert not hasattr(Policy, old) and (hasattr(Policy, new) or "Decision.DETOUR" in new)


@pytest.mark.parametrize(("old", "new"), NAMES.items())
def test_an_import_of_an_earlier_version_is_told_its_new_name(old, new, tmp_path, monkeypatch):
    (tmp_path / f"uses_{old}.py").write_text(f"from hybridattn.policies.base import {old}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(ImportError, match=f"'{old}' is called '{new}' now"):
        importlib.import_module(f"uses_{old}")
    with pytest.raises(InputError, match=f"cannot be imported: '{old}' is called '{new}' now"):
        make_policy(f"uses_{old}:Mine")
    assert hasattr(base, new)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        base.Nonsense  # noqa: B018


@pytest.mark.parametrize(
    ("policy", "old"),
    [
        ("async_overlap", "patience_us"),
        ("async_overlap", "max_cohorts"),
        ("async_overlap", "same_pass"),
        ("cpu_only", "cohorts"),
        ("adaptive", "plan_passes"),
    ],
)
def test_an_option_of_an_earlier_version_is_told_its_new_name(policy, old):
    with pytest.raises(InputError, match=f"policy '{policy}': option '{old}' is called '{OPTIONS[old]}' now"):
        make_policy(policy, **{old: 1})
    with pytest.raises(InputError, match=f"policy 'gpu_only' has no option '{old}'; it has"):
        make_policy("gpu_only", **{old: 1})  # nor by its new name


def test_a_wrapper_follows_what_changes_and_takes_over_what_does_not():
    wrapped = AsyncOverlap(cpu_fraction=0.5)
    policy = Wrapper(wrapped)
    wrapped.dispatch_cap, wrapped.next_detour_ns = 3, 17
    assert (policy.dispatch_cap, policy.next_detour_ns) == (3, 17)
    assert (policy.name, policy.tiers, policy.hooks) == (wrapped.name, wrapped.tiers, wrapped.hooks)
    assert Wrapper(GpuOnly(swap=True)).swap_in_below == 1.0


def test_a_wrapper_takes_over_every_attribute_of_the_contract():
    """One that is added to ``Policy`` later must not be forgotten there."""
    contract = {n for n in vars(Policy) if not n.startswith("_")} | {"cpu_fraction"}
    assert contract <= vars(Wrapper(AsyncOverlap())).keys() | vars(Wrapper).keys() | vars(Delegate).keys()
