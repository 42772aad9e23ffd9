"""What a command line cannot say, in one sentence that names what can be said instead."""

from __future__ import annotations

import re
import shlex
import traceback
from collections.abc import Iterable, Sequence

from hydra import compose, initialize_config_dir
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf.errors import OmegaConfBaseException

from experiments.machines import CONFIGS, group_file
from hybridattn.core.errors import InputError

OLD_KEYS = {  # last part of a key of a configuration -> its name today
    "passes": "steps", "plan_passes": "plan_steps", "same_pass": "same_step", "patience_us": "max_wait_us",
    "cohorts": "micro_batches", "max_cohorts": "max_micro_batches",
}  # fmt: skip
OLD_ROOTS = {"sweep": "hydra.sweeper.params (beside hydra.mode: MULTIRUN)", "launcher": "hydra/launcher"}
SPECIAL = set(" ,=(){}[]'\"\\:\t")


def check_words(words: Sequence[str]) -> None:
    """Refuse a command line with an old name, two experiments, or a value that has to stand in quotes."""
    overrides = [w for w in words if "=" in w and not w.startswith("-")]
    experiments = [w for w in overrides if key_of(w) == "experiment"]
    if len(experiments) > 1:
        raise InputError(f"one experiment at a time, got {' and '.join(experiments)}")
    for word in overrides:
        key, _, value = word.partition("=")
        name = key.lstrip("+~")
        if name == "launcher":
            raise InputError(f"{word}: launcher is now hydra/launcher, so write hydra/launcher={value}")
        if name.startswith("sweep."):
            axis = name.removeprefix("sweep.")
            raise InputError(f"{word}: the axes of a sweep are now hydra.sweeper.params; write {axis}={value}")
        _refuse_half_a_path(word)
        if note := renamed(name):
            raise InputError(f"{word} is not known{note}")


def respelt(word: str) -> str:
    """``model=...`` and ``hardware=...`` with the names of their files, however the models and cards are spelt."""
    key, _, value = word.partition("=")
    if key not in ("model", "hardware"):
        return word
    return f"{key}={','.join(group_file(key, name.strip()) or name for name in value.split(','))}"


def renamed(key: str) -> str:
    """Words to put behind a sentence about a key that is not known: its name today, where it has one."""
    last = key.rpartition(".")[2]
    today = OLD_KEYS.get(last) or OLD_ROOTS.get(key)
    return f"; {last} is now called {today}" if today else ""


def _refuse_half_a_path(word: str) -> None:
    """A path with a comma would be swept as two values, neither of which anybody meant."""
    key, _, value = word.partition("=")
    parts = value.split(",")
    unquoted = not set("'\"[({") & set(value)
    if unquoted and value.startswith(("/", "./", "../", "~/")) and not all("/" in p for p in parts):
        raise InputError(
            f"{word} would be swept as {len(parts)} values; a path that holds a comma is written {quoted(key, value)}"
        )


def quoted(key: str, value: str) -> str:
    """``key=value`` as a shell and Hydra both take it for one text."""
    bare = value[1:-1] if len(value) > 1 and value[0] in "'\"" and value[-1] == value[0] else value
    return shlex.quote(f'{key}="{_escaped(bare, chr(34))}"')


def literal(key: str, value: str) -> str:
    """``key=value`` as an override for Hydra, whatever ``value`` holds."""
    return f"{key}='{_escaped(value, chr(39))}'"


def _escaped(text: str, quote: str) -> str:
    """``text`` for between two ``quote``: the grammar reads backslashes as such, except before a quote."""
    text = re.sub(rf"(\\*){quote}", lambda m: m[1] * 2 + "\\" + quote, text)
    return re.sub(r"(\\+)$", lambda m: m[1] * 2, text).replace("${", "\\${")


def key_of(override: str) -> str:
    """The key of an override, without its sign and package."""
    return override.lstrip("+~").split("=", 1)[0].split("@", 1)[0]


def among(override: str, keys: Iterable[str]) -> bool:
    """Whether an override says one of ``keys`` or something below it."""
    return any(key_of(override) == key or key_of(override).startswith(f"{key}.") for key in keys)


def composition_error(words: Sequence[str], error: Exception) -> str:
    """One sentence about an error of Hydra's; an error of a point or of the app itself is raised on."""
    if isinstance(error, HydraException | OmegaConfBaseException):
        return _several_values(words, error) or sentence(error) + _hint(words, error)
    frames = [frame.f_globals.get("__name__", "") for frame, _ in traceback.walk_tb(error.__traceback__)]
    if any(name.startswith(("experiments.", "hydra_plugins.")) and name != "experiments.run" for name in frames):
        raise error
    return f"{' '.join(words)} cannot be composed: {sentence(error)}"


def _several_values(words: Sequence[str], error: Exception) -> str:
    """Hydra reports a swept value without --multirun also where the true mistake stands beside it: look for that."""
    if "--multirun" not in str(error):
        return ""
    overrides = [w for w in words if not w.startswith("-")]
    parsed = OverridesParser.create().parse_overrides(overrides)
    swept = [o for o in parsed if o.is_sweep_override()]
    try:
        with initialize_config_dir(str(CONFIGS), version_base="1.3"):
            compose("config", [o.input_line or "" for o in parsed if not o.is_sweep_override()])
    except (HydraException, OmegaConfBaseException) as true_error:
        return sentence(true_error)
    first = swept[0]
    value = (first.input_line or "").partition("=")[2]
    return (
        f"{first.input_line} is more than one value: add -m (--multirun) to sweep it, or write "
        f"'{first.get_key_element()}=[{value}]' for a list and {quoted(first.get_key_element(), value)} for one text"
    )


def _hint(words: Sequence[str], error: Exception) -> str:
    """How the word that could not be parsed is written."""
    if not isinstance(error, OverrideParseException):
        return ""
    key, _, value = error.override.partition("=")
    return f"; as one text it is written {quoted(key, value)}" if key and SPECIAL & set(value) else ""


def parse(lines: Sequence[str]) -> list[Override]:
    """Overrides in order, one per key: the last one counts."""
    try:
        parsed = OverridesParser.create().parse_overrides(list(lines))
    except HydraException as error:
        raise InputError(sentence(error) + _hint(lines, error)) from error
    return list({(o.type, o.get_key_element()): o for o in parsed}.values())


def sentence(error: BaseException) -> str:
    """The message of a composition error in one sentence: what is wrong, and what there is."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    cause = error.__cause__
    if isinstance(cause, OmegaConfBaseException):
        lines.insert(1, str(cause).splitlines()[0])
    noise = ("full_key", "object_type", "reference_type", "To append to your config", "Set the env", "Config search")
    kept = list(dict.fromkeys(line for line in lines if not line.startswith(noise) and not line.startswith("provider")))
    options = next((i for i, line in enumerate(kept) if line.startswith("Available options")), None)
    if options is not None:
        head = [line for line in kept[:options] if not line.startswith("In '")] or kept[:options]
        found = f"{' '.join(head)}; available are {', '.join(k for k in kept[options + 1 :] if k != 'schema')}"
        plugin = re.search(r"hydra/launcher/(\w+?)(?:_|\W|$)", found)
        return f"{found} (is its plugin installed? pip install hydra-{plugin[1]}-launcher)" if plugin else found
    text = ": ".join(line.rstrip(".") for line in kept) or type(error).__name__
    below = re.search(r"'(policy|workload)\.(\w+)'.* not in 'Target'", text)
    if below:
        return f"{text}; what the {below[1]} takes is written {below[1]}.options.{below[2]}"
    unknown = re.search(r"Key '(\w+)' (?:is )?not in|Could not override '([\w/]+)'", text)
    return text + renamed(unknown[1] or unknown[2]) if unknown else text
