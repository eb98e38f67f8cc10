"""``qsvc dashboard``: queues, jobs and workers in a browser."""

from __future__ import annotations

import click

from queue_service.connection import connect
from queue_service.errors import ConfigurationError
from queue_service.settings import RedisSettings, redact_url


@click.command("dashboard")
@click.option("--redis", "redis_url", metavar="URL", help="The server with the queues.")
@click.option("--host", default="127.0.0.1", show_default=True, help="The address to listen on.")
@click.option(
    "--port",
    type=click.IntRange(0, 65535),
    default=9181,
    show_default=True,
    help="The port to listen on; 0 takes any free one.",
)
@click.option("--username", default="qsvc", show_default=True, help="Who logs in.")
@click.option(
    "--password",
    envvar="QSVC_DASHBOARD_PASSWORD",
    show_envvar=True,
    help="Ask for this password; needed to listen where other machines can connect.",
)
def command(
    redis_url: str | None, host: str, port: int, username: str, password: str | None
) -> None:
    """Show queues, jobs and workers in a browser until Ctrl-C."""
    # Here, since the packages that this needs are optional.
    try:
        from queue_service.dashboard import Login, make_server
    except ModuleNotFoundError as exc:
        raise ConfigurationError(
            f"The dashboard needs the package {exc.name}. Install it with: "
            "pip install 'qsvc[dashboard]'"
        ) from exc
    settings = RedisSettings.load(url=redis_url)
    with connect(settings) as connection:
        server = make_server(
            connection,
            server_name=redact_url(settings.url),
            host=host,
            port=port,
            login=Login(username, password) if password else None,
        )
        shown_host = f"[{host}]" if ":" in host else host
        click.echo(f"http://{shown_host}:{server.port}/")
        server.serve_forever()
