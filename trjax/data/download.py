"""CIFAR's archives from the network: taken up again where they were cut off, kept only if their checksum is right."""

# pooch deletes a file that was cut off and starts again from its first byte; here `.partial` is resumed by Range.

import hashlib
import re
from collections.abc import Sequence
from http.client import HTTPException
from pathlib import Path
from urllib.error import HTTPError
from urllib.parse import urljoin, urlsplit
from urllib.request import Request, urlopen

from trjax.data.cifar import HOME
from trjax.data.image_files import ReportProgress
from trjax.files import partial_path, sync
from trjax.text import describe_error

TIMEOUT_SECONDS = 30.0
"""For which nothing may come."""
_ATTEMPTS = 20  # for one address, as long as each gets some bytes more
_CHUNK_BYTES = 2**18
_NO_SUCH_RANGE = 416


ARCHIVES = {
    "cifar10": ("cifar-10-python.tar.gz", "c58f30108f718f92721af3b95e74349a"),
    "cifar100": ("cifar-100-python.tar.gz", "eb9058c3a382ffc7106e4002c42a8d85"),
}
"""File name and MD5 of the archive of each source. Source: `HOME`, beside which they lie."""


def _md5_of(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, lambda: hashlib.md5(usedforsecurity=False)).hexdigest()


def _size_of(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _receive(url: str, path: Path, report: ReportProgress) -> str:
    """Adds to a file what is missing of it; returns why that is not all of it, or "".

    If the server cannot send a part, it sends the whole file, which replaces what there was.

    Raises:
        OSError: the file cannot be written; what the network does is returned.
    """
    start = _size_of(path)
    request = Request(url, headers={"Range": f"bytes={start}-"} if start else {})
    try:
        response = urlopen(request, timeout=TIMEOUT_SECONDS)
    except HTTPError as error:
        error.close()
        return "" if start and error.code == _NO_SUCH_RANGE else f"{error.code} {error.reason}"  # or it is all there
    except (OSError, HTTPException) as error:
        cause = getattr(error, "reason", error)  # of a URLError, often another error
        return describe_error(cause) if isinstance(cause, Exception) else str(cause)
    with response:
        resumed = response.status == 206
        if resumed and not re.match(rf"bytes {start}-", response.headers.get("Content-Range", "")):
            return f"it sends {response.headers.get('Content-Range')!r} for the bytes from {start} on"
        done = start if resumed else 0
        total = done + int(response.headers.get("Content-Length", 0))
        with path.open("ab" if resumed else "wb") as file:
            while True:
                try:
                    chunk = response.read(_CHUNK_BYTES)
                except (OSError, HTTPException) as error:
                    return describe_error(error)
                if not chunk:
                    return f"cut off after {done:,} of {total:,} bytes" if done < total else ""
                file.write(chunk)
                done += len(chunk)
                report(path.name, done, total)


def _fetch(url: str, path: Path, md5: str, report: ReportProgress) -> str:
    """Brings a file to its end from one address; returns why that cannot be, or "".

    Raises:
        OSError: the file cannot be written.
    """
    reason = ""
    for _ in range(_ATTEMPTS):
        start = _size_of(path)
        reason = _receive(url, path, report)
        if reason and _size_of(path) <= start:
            break
        if not reason:
            if (found := _md5_of(path)) == md5:
                return ""
            path.unlink()
            reason = f"its MD5 is {found}, not {md5}"
            if not start:  # all of it came from here; otherwise the first part may be to blame
                break
    return reason


def download(name: str, target: Path, mirrors: Sequence[str] = (), report: ReportProgress = lambda *_: None) -> str:
    """Downloads a set's archive into a folder, and returns what has become of it.

    The file has its name only when its checksum is right; until then, and after a failure, what has come is in
    `<name>.partial`, for the next try.

    Args:
        name: of the set.
        target: the folder, made if it is not there.
        mirrors: addresses to try before the official one, of the file, or of its folder with a slash at the end.
        report: is called with the progress.

    Raises:
        ValueError: a mirror is no address, or no address has the file: says what each did.
        OSError: the file cannot be written.
    """
    file, md5 = ARCHIVES[name]
    if other := next((url for url in mirrors if urlsplit(url).scheme not in ("http", "https")), None):
        raise ValueError(f"mirror={other!r}: must begin with https:// or http://")
    urls = [url + file if url.endswith("/") else url for url in (*mirrors, urljoin(HOME, file))]
    path = target / file
    target.mkdir(parents=True, exist_ok=True)
    if path.exists():
        if _md5_of(path) == md5:
            return f"{path} is there already, and whole"
        path.replace(path.with_name(f"{path.name}.damaged"))
    partial, reasons = partial_path(path), []
    for url in urls:
        if not (reason := _fetch(url, partial, md5, report)):
            sync(partial)
            partial.replace(path)
            return f"{path}: {path.stat().st_size:,} bytes from {url}, MD5 {md5}"
        reasons.append(f"{url}: {reason}")
    kept = f"; {_size_of(partial):,} bytes are kept in {partial} for the next try" if partial.exists() else ""
    raise ValueError(f"{file} could not be had: {'; '.join(reasons)}{kept}")
