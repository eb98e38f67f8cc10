"""Chromium without a screen, and the dashboard to look at, for tests and pictures."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

from selenium import webdriver
from selenium.webdriver.chrome.options import Options
from selenium.webdriver.chrome.service import Service

_DASHBOARD = "from cli.dashboard_command import command; command()"
_END_SECONDS = 30
# It asks for nothing outside: what a page loads from elsewhere would be missing.
_FLAGS = (
    "--headless=new",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--window-size=1280,800",
)


def has_browser() -> bool:
    """Whether Chromium and its driver are installed."""
    return all(shutil.which(program) for program in ("chromium", "chromedriver"))


@contextlib.contextmanager
def open_browser(profile: Path) -> Iterator[webdriver.Chrome]:
    """Open a browser that keeps what it writes in an empty folder."""
    options = Options()
    options.binary_location = shutil.which("chromium") or ""
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(shutil.which("chromedriver")))
    try:
        yield driver
    finally:
        driver.quit()


@contextlib.contextmanager
def running_dashboard(redis_url: str) -> Iterator[str]:
    """Serve `qsvc dashboard` for the length of the block; gives its address."""
    with subprocess.Popen(
        [sys.executable, "-c", _DASHBOARD, "--port", "0", "--redis", redis_url],
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        assert process.stdout is not None
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.communicate(timeout=_END_SECONDS)
