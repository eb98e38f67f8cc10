"""The application's own jobs, which a stock rq worker runs."""

from pathlib import Path

from rq import get_current_job


def keep(path: str) -> None:
    """Write the answer that this job has waited for into a file."""
    [asked] = get_current_job().fetch_dependencies()
    answer = asked.return_value()["choices"][0]["message"]["content"]
    Path(path).write_text(answer + "\n", encoding="utf-8")
