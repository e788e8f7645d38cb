"""Files that a page holds in itself, as the addresses of its links: a browser saves them without a server."""

from base64 import b64encode
from collections.abc import Mapping
from io import BytesIO
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

FIRST_DATE = (
    1980,
    1,
    1,
    0,
    0,
    0,
)  # of a ZIP archive; the same for every file, so that the same files give the same bytes
REGULAR_FILE = 0o644 << 16  # Unix permissions in the upper half of `external_attr`, as Info-ZIP writes them


def zip_address(folder: str, texts: Mapping[str, str]) -> str:
    """Return a `data:` address of an archive that holds texts by name, in one folder."""
    content = BytesIO()
    with ZipFile(content, "w") as archive:
        for name, text in texts.items():
            entry = ZipInfo(f"{folder}/{name}", FIRST_DATE)
            entry.compress_type, entry.external_attr = ZIP_DEFLATED, REGULAR_FILE
            archive.writestr(entry, text)
    return _address("application/zip", content.getvalue())


def json_address(text: str) -> str:
    """Return a `data:` address of a JSON document."""
    return _address("application/json", text.encode())


def _address(kind: str, content: bytes) -> str:
    return f"data:{kind};base64,{b64encode(content).decode()}"
