"""Returns the `Binary` of a source, from a cache or by a compiler. Calls no GPU, chooses no constants.

Folders and bundles in `KSGEN_CACHE_PATH` are searched first (separated as in PATH; missing ones are skipped). The
user's folder, bundles in use, and bundles that the caller adds follow in this order. A new binary is stored in the
first folder that accepts it. With `KSGEN_NO_COMPILE=1`, a binary that no cache holds is an error.
"""

import contextlib
import fcntl
import functools
import os
import queue
import time
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ksgen import paths
from ksgen.build.bundle import Bundle
from ksgen.build.cache import Cache, max_bytes_from_environment
from ksgen.build.children import Crew, current_children
from ksgen.build.host import host_target
from ksgen.build.processors import instruction_sets_here, set_of
from ksgen.build.request import Binary, Compiler, Request, Resources, compiler_provenance, digest_of
from ksgen.build.toolchain import Nvcc, Nvrtc, UnfitError, find_compiler, fit_for, next_compiler
from ksgen.errors import KsgenError, ToolchainError, warn
from ksgen.locks import new_lock
from ksgen.ownership import UntrustedError, own_temporary

__all__ = ["Binary", "CacheLayers", "Compiler", "Request", "Resources", "build", "build_many", "default_caches"]

LOCK_SECONDS = 120.0  # longest wait for another process that compiles the same request; then this one compiles it, too

Result = Binary | KsgenError
CacheLayer = Cache | Bundle

# bundles that this process uses, the newest first; the tuple is replaced, because threads read it without a lock
_in_use: tuple[weakref.ref[Bundle], ...] = ()
_warned: set[tuple[Path, ...]] = set()  # the folders that this process has warned about
_guard = new_lock()


class CacheLayers:
    """Several cache layers as one. The first binary found is used; a new one goes to the first folder that takes it."""

    def __init__(self, layers: Iterable[CacheLayer]) -> None:
        self.layers = tuple(layers)
        self.folders = tuple(each for each in self.layers if isinstance(each, Cache))

    def get(self, request: Request, compiler: Compiler | None = None) -> Binary | None:
        return next((found for layer in self.layers if (found := layer.get(request, compiler))), None)

    def put(self, request: Request, binary: Binary) -> None:
        refusals = []
        for cache in self.folders:
            try:
                return cache.put(request, binary)
            except UntrustedError:  # `get` has warned
                continue
            except OSError as error:
                refusals.append(f"{cache.path} ({error.strerror or error})")
        if refusals and _first_time(tuple(cache.path for cache in self.folders)):
            places = ", ".join(refusals)
            warn(
                f"kernels are not cached, and are compiled again next time: {places}; set KSGEN_CACHE_DIR to another "
                "folder"
            )


def default_caches(*bundles: CacheLayer) -> CacheLayers:
    listed = [Path(paths.from_start(each)) for each in os.environ.get("KSGEN_CACHE_PATH", "").split(os.pathsep) if each]
    project = tuple(place for place in listed if os.path.exists(place))  # False for one that cannot be looked up
    return CacheLayers(
        (*_layers(project, paths.cache_dir(), max_bytes_from_environment()), *bundles_in_use(), *bundles)
    )


def put_in_use(bundle: Bundle) -> None:
    """Let `build` search this bundle after all caches, from now on and as long as the `Bundle` object exists."""
    global _in_use
    with _guard:
        _in_use = (weakref.ref(bundle), *(each for each in _in_use if each()))


def bundles_in_use() -> tuple[Bundle, ...]:
    return tuple(bundle for each in _in_use if (bundle := each()))


@dataclass(frozen=True)
class AbsentCompiler:
    """Placeholder for a compiler that a device needs and this machine lacks. `why` is the reason.

    With it, cached binaries of any compiler are accepted.
    """

    why: str
    name: str = "none"
    version: str = ""

    def options(self, target: str) -> tuple[str, ...]:
        return ()

    def compile(self, text: str, entry: str, target: str) -> Binary:
        raise ToolchainError(f"{entry}: {self.why}")


def build(
    text: str, entry: str, target: str, compiler: Compiler | None = None, caches: CacheLayers | None = None
) -> Binary:
    """Return the binary of one source, by the given compiler or the machine's CUDA compiler.

    If a compiler does not work here, the next one is tried, unless the user named the compiler. Without any compiler, a
    cached binary of the same source is used.
    """
    request = Request(text, entry, target)
    caches = default_caches() if caches is None else caches
    if compiling_is_forbidden():
        found = caches.get(request, compiler) if compiler else None
        return found or _prebuilt(request, caches, "KSGEN_NO_COMPILE forbids compiling it")
    if isinstance(compiler, AbsentCompiler):
        return _prebuilt(request, caches, compiler.why)
    try:
        compiler = find_compiler() if compiler is None else compiler
    except ToolchainError as error:
        return _prebuilt(request, caches, str(error))
    unfit: UnfitError | None = None
    while True:
        try:
            if unfit:
                compiler = next_compiler(unfit, target)
            elif isinstance(compiler, Nvcc | Nvrtc):
                compiler = fit_for(compiler, target)
        except ToolchainError:  # no other is left
            if found := caches.get(request):
                return found
            raise
        try:
            return caches.get(request, compiler) or _compile_once(request, compiler, caches)
        except UnfitError as error:
            unfit = error


def build_many(
    jobs: Iterable[Request],
    compiler: Compiler | None = None,
    workers: int | None = None,
    on_done: Callable[[Request, Result], None] | None = None,
) -> list[Result]:
    """Build all requests, several at a time. The result of a failed request is its error.

    `on_done` is called in this thread, once per job, in the order in which jobs finish. An interrupt, or an exception
    from `on_done`, ends all running compilers, and no further one is started.
    """
    jobs, caches = tuple(jobs), default_caches()
    done: queue.SimpleQueue[tuple[int, Result | BaseException]] = queue.SimpleQueue()
    crew, results = Crew(), dict[int, Result]()

    def work(index: int) -> None:
        job = jobs[index]
        try:
            done.put((index, build(job.text, job.entry, job.target, compiler, caches)))
        except BaseException as error:  # handed to the thread that asked
            done.put((index, error))

    try:
        for index in range(len(jobs)):
            crew.add(functools.partial(work, index), workers or usable_cores())
        for _ in jobs:
            index, result = done.get()
            if not isinstance(result, Binary | KsgenError):
                raise result
            results[index] = result
            if on_done:
                on_done(jobs[index], result)
    finally:
        crew.stop(getattr(compiler, "must_end", False))
    return [results[index] for index in range(len(jobs))]


def usable_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def compiling_is_forbidden() -> bool:
    return os.environ.get("KSGEN_NO_COMPILE", "") not in ("", "0")


def _compile_once(request: Request, compiler: Compiler, caches: CacheLayers) -> Binary:
    """Compile, unless another process or thread compiled the same request first."""
    # If no folder can store the binary, waiting is pointless: every caller compiles at the same time.
    places = [str(cache.path.absolute()) for cache in caches.folders]
    with _lock(digest_of(request.key(compiler), *places)) if places else contextlib.nullcontext():
        if found := caches.get(request, compiler):
            return found
        made = compiler.compile(request.text, request.entry, request.target)
        binary = replace(made, provenance={**made.provenance, **compiler_provenance(compiler, request.target)})
        caches.put(request, binary)
        return binary


@contextlib.contextmanager
def _lock(name: str) -> Iterator[None]:
    """Hold a lock among this machine's processes and threads. It is also released when its process ends.

    The lock only avoids duplicate work: if it cannot be acquired in time, or at all, the caller continues without it.
    """
    deadline = time.monotonic() + LOCK_SECONDS
    held = None
    with contextlib.suppress(OSError):
        while held is None and time.monotonic() < deadline and not current_children.get().stopped:
            held = _try_lock(name)
            if held is None:
                time.sleep(0.02)
    try:
        yield
    finally:
        if held is not None:
            _unlock(name, held)


def _try_lock(name: str) -> int | None:
    path = own_temporary() / name  # not in the cache, which may be shared over a network
    file = os.open(path, os.O_CREAT | os.O_RDWR | os.O_NOFOLLOW, 0o600)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        # The earlier holder may have removed the file while this thread was about to lock it.
        if os.stat(path).st_ino == os.fstat(file).st_ino:
            return file
    except (BlockingIOError, FileNotFoundError):
        pass
    except BaseException:
        os.close(file)
        raise
    os.close(file)
    return None


def _unlock(name: str, file: int) -> None:
    with contextlib.suppress(OSError):
        (own_temporary() / name).unlink()
        fcntl.flock(file, fcntl.LOCK_UN)  # a forked child may still have the file open
    os.close(file)


@functools.lru_cache
def _layers(project: tuple[Path, ...], user: Path, max_bytes: int) -> tuple[CacheLayer, ...]:
    """Cache layers for the current environment, cached so that each bundle is opened once."""
    layers = [Bundle(place) if place.is_file() else Cache(place, max_bytes=max_bytes) for place in project]
    return (*layers, Cache(user, max_bytes=max_bytes))


def _first_time(places: tuple[Path, ...]) -> bool:
    with _guard:
        first = places not in _warned
        _warned.add(places)
        return first


def _prebuilt(request: Request, caches: CacheLayers, why: str) -> Binary:
    """Cached binary by any compiler; `ToolchainError` with the reason `why` it cannot be built if there is none."""
    if found := caches.get(request):
        return found
    message = f"{request.entry}: no cache holds it for {request.target}, and {why}"
    raise ToolchainError(f"{message}; prepare it with: {_preparation(request.target)}") from None


def _preparation(target: str) -> str:
    if target != host_target():
        instruction_set = set_of(target)
        arch = instruction_set.name if instruction_set else target if target.startswith("sm_") else ""
        return f"ksgen build SPEC --arch {arch}" if arch else "ksgen build SPEC, on this device"
    best = next((each.name for each in instruction_sets_here()), None)
    elsewhere = f", or on another machine: ksgen bundle SPEC --arch {best}" if best else ""
    return f"ksgen build SPEC --arch host{elsewhere}"
