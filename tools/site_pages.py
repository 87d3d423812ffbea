"""A hook of MkDocs: the pages at the root of the repository join the site, and links between them and docs/ fit it."""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT_PAGES = {
    "README.md": "index.md",
    "CONTRIBUTING.md": "contributing.md",
    "CHANGELOG.md": "changelog.md",
    "SECURITY.md": "security.md",
}

_LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^\]]*)\]\((?P<target>[^)#\s:]+)(?P<anchor>#[^)\s]*)?\)")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages of the root."""
    root = Path(config.docs_dir).parent
    for source, name in ROOT_PAGES.items():
        files.append(File.generated(config, name, content=(root / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Rewrite links for the site, and read Markdown inside `<details>` as a forge does."""
    sources = {name: source for source, name in ROOT_PAGES.items()}
    place = posixpath.dirname(sources.get(page.file.src_uri, f"docs/{page.file.src_uri}"))
    base = posixpath.dirname(page.file.src_uri)

    def rewrite(link: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join(place, link["target"]))
        name = ROOT_PAGES.get(path, path.removeprefix("docs/"))
        if files.get_file_from_path(name) is None:  # a file outside the site, such as source code
            return link["text"]
        target = posixpath.relpath(name, base or ".")
        return f"{link['image']}[{link['text']}]({target}{link['anchor'] or ''})"

    del config
    return _LINK.sub(rewrite, markdown.replace("<details>", "<details markdown>"))
