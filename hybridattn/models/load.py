"""From a model's name to what the stages need."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from hybridattn.core.errors import InputError
from hybridattn.core.params import MAX_SEED, as_integer
from hybridattn.models.config import DecoderConfig, read_config
from hybridattn.models.locate import ModelSource, resolve
from hybridattn.models.text import Tokenizer
from hybridattn.models.weights import DecoderWeights, load_weights, random_weights


@dataclass(frozen=True, slots=True, eq=False)
class LoadedModel:
    """A model ready for ``Decoder(config, weights)``. A dummy model has no tokenizer: give it token ids."""

    config: DecoderConfig
    weights: DecoderWeights
    tokenizer: Tokenizer | None
    source: ModelSource


def load(name: str | os.PathLike[str], dtype: str = "fp32", device: str = "cpu", seed: int = 0) -> LoadedModel:
    """Loads a model.

    Parameters
    ----------
    name : see ``hybridattn.models.locate.resolve``
    dtype : ``fp32`` or ``bf16``; weights of another dtype are converted
    device : torch device of the weights
    seed : of the random weights of a ``dummy:`` model; unused otherwise

    Raises
    ------
    InputError : unknown name, unsupported architecture or setting, a damaged or incomplete checkpoint
    """
    source, number = resolve(name), as_integer(seed)
    if number is None or not 0 <= number <= MAX_SEED:
        raise InputError(f"seed of the random weights must be an integer in 0..{MAX_SEED}, got {seed!r}")
    if source.folder is None:
        assert source.dummy is not None  # ModelSource holds exactly one of the two
        return LoadedModel(source.dummy, random_weights(source.dummy, number, dtype, device), None, source)
    with _as_input_error(source.folder):
        tokenizer = Tokenizer(source.folder)
        config = read_config(source.folder, tokenizer.eos_id, source.name)
        tokenizer.model_vocab_size = config.shape.vocab_size
    return LoadedModel(config, load_weights(source.folder, config, dtype, device), tokenizer, source)


@contextmanager
def _as_input_error(folder: Path) -> Iterator[None]:
    """JSON files may hold anything: a value of another type than its key needs is the file's fault."""
    try:
        yield
    except InputError:
        raise
    except (TypeError, ValueError, AttributeError, LookupError, ArithmeticError, RecursionError) as error:
        raise InputError(f"the files of {folder} hold a value of the wrong kind: {error}") from error
