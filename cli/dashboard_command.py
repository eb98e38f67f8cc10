"""``qsvc dashboard``: queues, jobs and workers in a browser."""

from __future__ import annotations

from pathlib import Path

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
@click.option(
    "--password-file",
    type=click.Path(path_type=Path),
    envvar="QSVC_DASHBOARD_PASSWORD_FILE",
    show_envvar=True,
    help="Read that password from a file, such as a secret of a container.",
)
def command(
    redis_url: str | None,
    host: str,
    port: int,
    username: str,
    password: str | None,
    password_file: Path | None,
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
    if password_file is not None:
        password = _read_password(password_file)
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


def _read_password(path: Path) -> str:
    try:
        password = path.read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as exc:
        raise ConfigurationError(f"The password cannot be read from {path}: {exc}") from exc
    if not password:
        # Without one everybody would be let in, which is not what the file was given for.
        raise ConfigurationError(f"There is no password in {path}.")
    return password
