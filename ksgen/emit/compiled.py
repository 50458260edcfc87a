"""Keeps compiled templates in the user's cache, because compiling them takes longer than rendering a kernel.

There is one file per template and version of Python. A file that is damaged, or that another user can have written, is
never loaded: its template is compiled again.
"""

import hashlib
import sys
from contextlib import suppress

import jinja2
from jinja2.bccache import Bucket

from ksgen.errors import KsgenError
from ksgen.files import read, replaced
from ksgen.ownership import check_folder, keep_from_others, make_folder
from ksgen.paths import cache_dir

FOLDER = "templates"  # in the cache
MOST_BYTES = 2**24  # of the largest compiled template that is read; usual ones have kilobytes
_SEAL_BYTES = hashlib.sha256().digest_size


class CompiledTemplates(jinja2.BytecodeCache):
    """Compiled templates of environments with these settings, one of which is the folder of the templates."""

    def __init__(self, *settings: object) -> None:
        self._made_with = "\0".join(map(str, (sys.version, jinja2.__version__, *settings)))

    def get_cache_key(self, name: str, filename: str | None = None) -> str:
        return f"{name.replace('/', '.')}.{sys.implementation.cache_tag}"

    def get_source_checksum(self, source: str) -> str:
        return hashlib.sha256(f"{self._made_with}\0{source}".encode()).hexdigest()

    def load_bytecode(self, bucket: Bucket) -> None:
        folder = cache_dir() / FOLDER
        with suppress(OSError):
            for each in (folder.parent, folder):
                check_folder(each)
            content = read(folder / bucket.key, MOST_BYTES, is_own=True)
            if _seal(content[_SEAL_BYTES:]) == content[:_SEAL_BYTES]:
                bucket.bytecode_from_string(content[_SEAL_BYTES:])

    def dump_bytecode(self, bucket: Bucket) -> None:
        compiled, folder = bucket.bytecode_to_string(), cache_dir() / FOLDER
        with suppress(OSError, KsgenError):  # the cache cannot be written to, which a build warns of
            make_folder(folder)
            with replaced(folder / bucket.key) as aside:
                aside.write_bytes(_seal(compiled) + compiled)
                keep_from_others(aside)


def _seal(compiled: bytes) -> bytes:
    """Digest that a file begins with. It proves that the rest is whole, before any of it is loaded."""
    return hashlib.sha256(compiled).digest()
