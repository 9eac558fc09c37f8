"""A hook of MkDocs: documents of the repository's root become pages of the site beside those of `docs/`."""

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

_PAGES = {"README.md": "index.md", "CONTRIBUTING.md": "CONTRIBUTING.md", "CHANGELOG.md": "CHANGELOG.md"}
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add a page for each document, with the addresses that its links have on the site."""
    root = Path(config.config_file_path).parent
    for name, page in _PAGES.items():
        text = (root / name).read_text(encoding="utf-8")
        files.append(File.generated(config, page, content=_LINK.sub(_on_site, text)))
    return files


def _on_site(link: re.Match[str]) -> str:
    text, address = link.groups()
    if "://" in address or address.startswith("#"):
        return link[0]
    path, _, anchor = address.partition("#")
    page = _PAGES.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
    # What is no page of the site is named by its path in the repository.
    return f"[{text}]({page}{'#' * bool(anchor)}{anchor})" if page else f"`{path}`"
