"""The qsvc command: finds the command's file, and turns errors into exit codes."""

from __future__ import annotations

import difflib
import importlib
import sys
from collections.abc import Mapping
from importlib.metadata import version

import click

from cli.exits import EXIT_INTERRUPTED, EXIT_SOME_FAILED
from cli.flags import told
from cli.printable import printable
from queue_service import errors

# Each command is imported when it is used: `qsvc status` needs no batch reader and no model.
COMMANDS: Mapping[str, str] = {
    "run": "cli.run_command",
    "worker": "cli.worker_command",
    "submit": "cli.submit_command",
    "status": "cli.status_command",
    "top": "cli.top_command",
    "results": "cli.results_command",
    "tail": "cli.tail_command",
    "trace": "cli.trace_command",
    "cancel": "cli.cancel_command",
    "retry": "cli.retry_command",
    "batches": "cli.batches_command",
    "delete": "cli.delete_command",
    "dead": "cli.dead_command",
    "cache": "cli.cache_command",
    "doctor": "cli.doctor_command",
    "fit": "cli.fit_command",
    "bench": "cli.bench_command",
    "dashboard": "cli.dashboard_command",
}

EXIT_CODES: Mapping[type[errors.QsvcError], int] = {
    errors.ConfigurationError: 2,
    errors.BatchFileError: 2,
    errors.BatchConflict: 2,
    errors.ServerUnavailable: 3,
    errors.BatchNotFound: 4,
    errors.JobNotFound: 4,
    errors.ModelUnavailable: 5,
}


class LazyGroup(click.Group):
    """A group whose commands are imported when they are asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Return the commands in the order in which people meet them."""
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import and return a command, None when there is none of that name."""
        module = COMMANDS.get(cmd_name)
        if module is None:
            return None
        command: click.Command = importlib.import_module(module).command
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command of a line, or say which one was meant: click knows only loaded ones."""
        name = args[0]
        meant = difflib.get_close_matches(name, COMMANDS, n=1)
        if meant and name not in COMMANDS and not ctx.resilient_parsing:
            raise click.UsageError(f"No such command {name!r}. Did you mean {meant[0]!r}?", ctx)
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(version("qsvc"), prog_name="qsvc")
def cli() -> None:
    """Durable batch inference for language models on MLX: every answer exactly once."""
    from cli.options import say  # here: help and version need none of it
    from queue_service.settings import unknown_variables

    for mistake in unknown_variables():
        say(mistake)


def main() -> None:
    """Run the command line and exit with a code that says what happened."""
    try:
        code = cli.main(standalone_mode=False)
    except click.exceptions.Abort:
        code = EXIT_INTERRUPTED
    except click.ClickException as error:
        error.show()
        code = error.exit_code
    except errors.QsvcError as error:
        click.echo(printable(f"qsvc: {told(error)}", keep="\n\t"), err=True)
        code = next((c for kind, c in EXIT_CODES.items() if isinstance(error, kind)), 1)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of our output is gone, as in `qsvc tail … | head`
        code = EXIT_SOME_FAILED
    sys.exit(code if isinstance(code, int) else 0)
