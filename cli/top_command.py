"""qsvc top: workers, queues, batches and what runs, as they come on."""

from __future__ import annotations

import time
from collections.abc import Callable

import click
from redis.exceptions import BusyLoadingError, ConnectionError, RedisError, TimeoutError
from rich.console import Console
from rich.live import Live

from cli.options import json_option, print_json, redis_option, server
from cli.terminal import Keyboard, clock_time, ending_with, is_live
from cli.top_view import Screenful
from queue_service.overview import Observer, Overview
from queue_service.settings import RedisSettings, WorkerSettings, redact_url

_OUTAGES = (ConnectionError, TimeoutError, BusyLoadingError)
# A file or a pipe has no columns; this is what most terminals have, and enough for every figure.
_PLAIN_COLUMNS = 160


@click.command("top", short_help="Watch workers, queues and batches.")
@redis_option
@click.option(
    "--interval",
    type=click.FloatRange(min=0.1),
    default=2.0,
    show_default=True,
    metavar="SECONDS",
    help="How often to look.",
)
@click.option("--once", is_flag=True, help="Look for one interval, print one picture, and end.")
@json_option
def command(redis_url: str | None, interval: float, once: bool, as_json: bool) -> None:
    """Show workers, queues, open batches and the longest running jobs until Ctrl-C or q.

    With --json it prints an object for each look, one a line. A server that goes away is waited
    for. Prompts and answers are never shown.
    """
    settings = RedisSettings.load(url=redis_url)
    with server(redis_url) as connection, ending_with():
        lease_seconds = WorkerSettings.load().lease_seconds
        watch = Watch(Observer(connection, lease_seconds=lease_seconds), redact_url(settings.url))
        if once:
            _print_once(watch, interval, as_json=as_json)
        elif as_json:
            _print_objects(watch, interval)
        else:
            _show(watch, interval)


class Watch:
    """Looks at a server, and keeps the last picture while it is away.

    Args:
        server: its URL without a password.
        clock: seconds, monotonic.
    """

    def __init__(
        self, observer: Observer, server: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._observer = observer
        self._server = server
        self._clock = clock
        self._overview = Overview(at=time.time())
        self._seen = time.strftime("%H:%M:%S")
        self._away_since: float | None = None
        self._error: RedisError | None = None

    def look(self) -> Overview:
        """Return a new overview.

        Raises:
            redis.RedisError: the server is away or refuses us.
        """
        self._overview = self._observer.look()
        self._seen = time.strftime("%H:%M:%S")
        self._away_since = None
        return self._overview

    def look_patiently(self) -> Overview | None:
        """Return a new overview; None while the server is away.

        Raises:
            redis.RedisError: the server refuses us, which does not pass by itself.
        """
        try:
            return self.look()
        except _OUTAGES as error:
            self._error = error
            if self._away_since is None:
                self._away_since = self._clock()
            return None

    def picture(self, *, is_cut: bool = False) -> Screenful:
        """Return what to show now."""
        return Screenful(self._overview, self._server, self._seen, self.outage, is_cut)

    @property
    def outage(self) -> str | None:
        """Why the server is away and for how long; None while it is there."""
        if self._away_since is None:
            return None
        away = clock_time(self._clock() - self._away_since)
        return f"the server is away, and waited for since {away} ({self._error})"


def _print_once(watch: Watch, interval: float, *, as_json: bool) -> None:
    """Look twice, since what is measured takes two looks."""
    watch.look()
    time.sleep(interval)
    overview = watch.look()
    if as_json:
        print_json(overview.to_object())
        return
    console = _console()
    console.print(watch.picture())


def _print_objects(watch: Watch, interval: float) -> None:
    while True:
        overview = watch.look_patiently()
        if overview is not None:
            print_json(overview.to_object())
        else:
            print_json({"object": "outage", "message": watch.outage})
        time.sleep(interval)


def _show(watch: Watch, interval: float) -> None:
    console = _console()
    if not is_live(console):
        while True:
            watch.look_patiently()
            console.print(watch.picture())
            console.print()
            time.sleep(interval)
    watch.look_patiently()
    with (
        Keyboard() as keyboard,
        Live(
            console=console,
            screen=True,
            get_renderable=lambda: watch.picture(is_cut=True),
            refresh_per_second=2,
            redirect_stdout=False,
        ),
    ):
        while not keyboard.is_pressed("q", within_seconds=interval):
            watch.look_patiently()


def _console() -> Console:
    """Return standard output; a file or a pipe is as wide as all there is to tell."""
    console = Console(highlight=False)
    return console if console.file.isatty() else Console(highlight=False, width=_PLAIN_COLUMNS)
