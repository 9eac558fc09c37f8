"""The models a server has: found by name, loaded when they are asked for, unloaded when nobody asks any more."""

import asyncio
import hashlib
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

from localinfer.errors import OutOfMemoryError, RequestError
from localinfer.server.meters import Meters
from localinfer.server.wire_errors import ApiError

if TYPE_CHECKING:
    from localinfer.llm import LLM
    from localinfer.server.model_memory import MemoryNeed

logger = logging.getLogger(__name__)

_LOOK_SECONDS = 1.0


@dataclass(frozen=True)
class ModelSource:
    """A model that can be loaded: its name to clients, which tells nothing of where it lies, and its file.

    created: when the file was last changed, in seconds since 1970.
    """

    id: str
    path: Path
    created: int

    @cached_property
    def fingerprint(self) -> str:
        """Differs for other models and other versions of localinfer."""
        facts = f"{version('localinfer')} {self.id} {self.created}"
        return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


@dataclass
class ServedModel:
    """A model of the server. llm: None while it is not loaded. num_leases: replies that use it now."""

    source: ModelSource
    llm: "LLM | None" = None
    need: "MemoryNeed | None" = None
    num_leases: int = 0
    last_used_seconds: float = 0.0
    loading: "asyncio.Task[LLM] | None" = field(default=None, repr=False)


class Lease:
    """A loaded model that stays loaded until it is released.

    fingerprint: tells clients whether the same model and version answered.
    """

    def __init__(self, model: ServedModel, llm: "LLM") -> None:
        self.llm = llm
        self.model_id = model.source.id
        self.fingerprint = model.source.fingerprint
        self._model: ServedModel | None = model
        model.num_leases += 1

    def release(self) -> None:
        """Let the model go; may be called again."""
        if self._model is not None:
            self._model.num_leases -= 1
            self._model.last_used_seconds = time.monotonic()
            self._model = None


class ModelRegistry:
    """Models by name. All methods but the loading itself run on the event loop.

    load: loads a model, in a thread. measure: says what one will take, before. idle_unload_seconds: None keeps models
    loaded. memory_limit: bytes that all loaded models may take together; None leaves it to the machine.
    context_length: the one that models are loaded with, None for their own.
    """

    def __init__(
        self,
        sources: Sequence[ModelSource],
        load: "Callable[[ModelSource], LLM]",
        measure: "Callable[[ModelSource], MemoryNeed]",
        meters: Meters,
        *,
        strict: bool = False,
        idle_unload_seconds: float | None = None,
        memory_limit: int | None = None,
        context_length: int | None = None,
    ) -> None:
        if not sources:
            raise RequestError("there is no model to serve; name one with -m, or a folder that holds some")
        self._models = {source.id: ServedModel(source) for source in sources}
        self._default = self._models[sources[0].id]
        self._load = load
        self._measure = measure
        self._meters = meters
        self._is_strict = strict or len(self._models) > 1
        self._idle_unload_seconds = idle_unload_seconds
        self._memory_limit = memory_limit
        self._context_length = context_length
        self._loading = asyncio.Lock()

    def models(self) -> list[ServedModel]:
        """All models, the default one first."""
        return list(self._models.values())

    def find(self, name: str | None) -> ServedModel:
        """The model of a name; without one, or where any name will do, the default. Raises: ApiError 404."""
        if not name:
            return self._default
        for candidate in (name, name.rpartition("/")[2], name.removesuffix(".gguf")):
            if candidate in self._models:
                return self._models[candidate]
        if not self._is_strict:
            return self._default
        known = ", ".join(list(self._models)[:10])
        raise ApiError(404, f"there is no model {name!r:.80}; there are {known}", code="model_not_found", param="model")

    def lease_loaded(self, name: str | None) -> Lease | None:
        """A model by name, unless it has to be loaded first. Raises: ApiError 404."""
        model = self.find(name)
        return None if model.llm is None else Lease(model, model.llm)

    async def lease(self, name: str | None) -> Lease:
        """A model by name, loaded first if need be. Raises: ApiError 404; LocalinferError if it cannot be loaded."""
        model = self.find(name)
        while model.llm is None:
            if model.loading is None:
                model.loading = asyncio.create_task(self._load_model(model))
            # Who asked first may leave; the others still want it.
            await asyncio.shield(model.loading)
        return Lease(model, model.llm)

    async def unload_idle(self) -> None:
        """Unload models that nobody used for long, for ever."""
        while self._idle_unload_seconds is not None:
            await asyncio.sleep(min(_LOOK_SECONDS, self._idle_unload_seconds))
            oldest = time.monotonic() - self._idle_unload_seconds
            for model in self._idle_models():
                if model.last_used_seconds <= oldest:
                    await self._unload(model)

    async def close(self) -> None:
        """Unload every model, whoever uses it."""
        loading = [model.loading for model in self._models.values() if model.loading is not None]
        await asyncio.gather(*loading, return_exceptions=True)
        for model in self._models.values():
            await self._unload(model)

    async def _load_model(self, model: ServedModel) -> "LLM":
        try:
            async with self._loading:
                if model.need is None:
                    model.need = await asyncio.to_thread(self._measure, model.source)
                await self._make_room(model, model.need)
                began = time.monotonic()
                llm = await asyncio.to_thread(self._load, model.source)
                model.llm, model.last_used_seconds = llm, time.monotonic()
                self._meters.loaded.inc()
                logger.info("loaded %s in %.1f s", model.source.id, time.monotonic() - began)
                return llm
        finally:
            model.loading = None

    async def _make_room(self, model: ServedModel, need: "MemoryNeed") -> None:
        """Unload idle models, least recently used first, until this one fits. Raises: OutOfMemoryError."""
        while True:
            try:
                need.check(model.source.id, self._available_bytes(), wanted_context=self._context_length)
            except OutOfMemoryError:
                idle = self._idle_models()
                if not idle:
                    raise
                await self._unload(min(idle, key=lambda other: other.last_used_seconds))
            else:
                return

    def _available_bytes(self) -> int:
        import psutil

        available = int(psutil.virtual_memory().available)
        if self._memory_limit is None:
            return available
        taken = sum(other.need.fixed_bytes for other in self._models.values() if other.llm is not None and other.need)
        return min(available, self._memory_limit - taken)

    def _idle_models(self) -> list[ServedModel]:
        return [model for model in self._models.values() if model.llm is not None and not model.num_leases]

    async def _unload(self, model: ServedModel) -> None:
        llm, model.llm = model.llm, None
        if llm is not None:
            await asyncio.to_thread(llm.close)
            self._meters.loaded.dec()
            logger.info("unloaded %s", model.source.id)


def find_models(folder: Path) -> list[ModelSource]:
    """The models of a folder, by name: GGUF files, of split ones the first part, and Hugging Face folders.

    Raises: RequestError if there is none, or two have one name.
    """
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; name one that holds models")
    sources: dict[str, ModelSource] = {}
    for path in sorted(folder.iterdir()):
        source = model_source(path)
        if source is None:
            continue
        if source.id in sources:
            raise RequestError(f"{path.name} and {sources[source.id].path.name} have one name; rename one of them")
        sources[source.id] = source
    if not sources:
        raise RequestError(f"{folder} holds no model; put GGUF files or Hugging Face folders into it")
    return list(sources.values())


def model_source(path: Path) -> ModelSource | None:
    """The model at a path; None if it is none, or a later part of a split one."""
    name = path.name
    if path.is_dir():
        if not (path / "config.json").is_file():
            return None
    elif path.suffix.lower() == ".gguf" and path.is_file():
        name, _, part = path.stem.partition("-of-")
        head, _, number = name.rpartition("-")
        if not (part.isdigit() and number.isdigit()):
            name = path.stem
        elif int(number) != 1:
            return None
        else:
            name = head
    else:
        return None
    return ModelSource(name, path, int(path.stat().st_mtime))
