"""Reading a safetensors checkpoint: one file or several shards with an index, checked before it is trusted."""

from __future__ import annotations

import json
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from hybridattn.core.errors import InputError
from hybridattn.models.config import each_key_once, read_json

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"


class Checkpoint:
    """The tensors of a checkpoint folder by name. A context manager: the files stay open inside it.

    Opening checks every header: a file that is truncated, has bytes after its data or overlapping offsets, or is no
    safetensors file at all, an index that names a missing shard, and a tensor that is in two shards are refused with an
    InputError that names the file.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._files: dict[Path, Any] = {}
        self._where: dict[str, Path] = {}
        for path in _shards(folder):
            self._open(path)
        self._check_index()

    def __enter__(self) -> Checkpoint:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, tb: TracebackType | None) -> None:
        self._files.clear()

    def _open(self, path: Path) -> None:
        try:
            handle = safe_open(path, framework="pt", device="cpu")
            names = list(handle.keys())
            _check_names(path)
        except (SafetensorError, OSError, ValueError) as e:
            raise InputError(f"{path} is not a readable safetensors file: {e}") from e
        for name in names:
            if name in self._where:
                raise InputError(f"tensor '{name}' is in two shards: {self._where[name].name} and {path.name}")
            self._where[name] = path
        self._files[path] = handle

    def _check_index(self) -> None:
        index = self.folder / INDEX
        if not index.exists():
            return
        for name, shard in _weight_map(index).items():
            found = self._where.get(name)
            if found is None or found.name != shard:
                where = f"it is in {found.name}" if found else "no shard has it"
                raise InputError(f"{index} places tensor '{name}' in {shard}, but {where}")

    @property
    def names(self) -> set[str]:
        return set(self._where)

    @property
    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Shape of every tensor by name, from the headers."""
        return {name: tuple(self._files[path].get_slice(name).get_shape()) for name, path in self._where.items()}

    def read(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        """The tensor ``name`` as stored (a view of the mapped file); InputError if absent, misshapen or no float."""
        if name not in self._where:
            raise InputError(f"checkpoint {self.folder} has no tensor '{name}'")
        tensor = self._files[self._where[name]].get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise InputError(
                f"tensor '{name}' of checkpoint {self.folder} has shape {tuple(tensor.shape)}, expected {shape}"
            )
        if not tensor.is_floating_point():
            raise InputError(f"tensor '{name}' of checkpoint {self.folder} is {tensor.dtype}, expected a float dtype")
        return tensor


def _check_names(path: Path) -> None:
    """ValueError if a name is in the header twice: of two tensors, the library would give the second."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        json.loads(file.read(length), object_pairs_hook=each_key_once)


def _shards(folder: Path) -> list[Path]:
    """The weight files of a folder: what the index names, else the single file, else whatever single file is there."""
    index = folder / INDEX
    if index.exists():
        paths = [folder / shard for shard in sorted(set(_weight_map(index).values()))]
        for path in paths:
            if not path.exists():
                raise InputError(f"{index} names the shard {path.name}, which is missing")
        return paths
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(folder.glob("*.safetensors"))
    if len(found) == 1:
        return found
    raise InputError(
        f"{folder} holds {len(found)} safetensors files and no {INDEX}; expected {SINGLE}, one file, or an index"
    )


def _weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise InputError(f"{index} has no weight_map")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard:
            raise InputError(f"{index} places tensor '{name}' in {shard!r}, which is no name of a file beside it")
    return weight_map
