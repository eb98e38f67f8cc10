"""The dashboard in a real browser, while a worker runs jobs that hold HTML and script."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from redis import Redis
from rq.job import Job
from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.support.wait import WebDriverWait

from queue_service import keys
from queue_service.rqcompat import SafeJob
from tests.browser import has_browser, open_browser, running_dashboard
from tests.fakes import CONTEXT
from tests.harness import enqueue_chat, eventually, running_worker, worker_settings

pytestmark = pytest.mark.skipif(
    not has_browser(), reason="chromium and chromedriver are not installed"
)

SECONDS = 30
# Each would leave its mark if any of it was taken for HTML.
ATTACK = (
    "<script>window.pwned = 1</script><img src=x onerror='window.pwned = 2'>"
    "</script><svg onload='window.pwned = 3'><b id=injected>bold</b>"
)


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    with open_browser(tmp_path_factory.mktemp("profile")) as driver:
        yield driver


@pytest.fixture
def dashboard(redis_url: str) -> Iterator[str]:
    """The address of `qsvc dashboard` on the tests' server."""
    with running_dashboard(redis_url) as address:
        yield address


def shows(browser: webdriver.Chrome, text: str) -> None:
    """Wait until a page has a text."""
    WebDriverWait(browser, SECONDS).until(
        lambda driver: text in driver.find_element(By.TAG_NAME, "body").text,
        f"{text!r} is not on the page",
    )


def assert_harmless(browser: webdriver.Chrome) -> None:
    """Nothing of a prompt or an answer became a part of the page, and no script failed."""
    assert browser.execute_script("return window.pwned === undefined")
    assert not browser.find_elements(By.ID, "injected")
    errors = [entry["message"] for entry in browser.get_log("browser")]
    assert not [message for message in errors if re.search("Uncaught|SyntaxError", message)], errors


def confirm(browser: webdriver.Chrome) -> None:
    """Say yes to the question that a button asks."""
    button = WebDriverWait(browser, SECONDS).until(
        lambda driver: next(
            (
                one
                for one in driver.find_elements(
                    By.CSS_SELECTOR, ".modal .btn-primary, .modal button"
                )
                if one.is_displayed() and re.search("yes|ok|confirm", one.text, re.IGNORECASE)
            ),
            None,
        )
    )
    button.click()


def test_pages_load_while_a_worker_runs_and_show_html_as_text(
    redis: Redis, redis_url: str, dashboard: str, browser: webdriver.Chrome, tmp_path: Path
) -> None:
    answered = enqueue_chat(redis, ATTACK)
    refused = enqueue_chat(redis, ATTACK * (CONTEXT // len(ATTACK) + 1))
    with running_worker(worker_settings(redis_url)):
        for job in (answered, refused):
            eventually(lambda job=job: job.get_status() in ("finished", "failed"), job.id)  # type: ignore[misc]
        for path, text in (
            ("", keys.DEFAULT_QUEUE),
            (f"0/view/job/{answered.id}", "finished"),
            (f"0/view/job/{refused.id}", "failed"),
            (f"0/view/jobs/{keys.DEFAULT_QUEUE}/finished/8/asc/1", answered.id),
            (f"0/view/jobs/{keys.DEFAULT_QUEUE}/failed/8/asc/1", refused.id),
            ("0/view/workers", "worker"),
        ):
            browser.get(dashboard + path)
            shows(browser, text)
            assert_harmless(browser)
        browser.get(f"{dashboard}0/view/job/{answered.id}")
        shows(browser, "window.pwned = 1")  # the answer is there, as text
        assert_harmless(browser)


def test_a_failed_job_is_queued_again_and_another_one_deleted_by_a_click(
    redis: Redis, redis_url: str, dashboard: str, browser: webdriver.Chrome
) -> None:
    jobs = [enqueue_chat(redis, "x" * CONTEXT) for _ in range(2)]
    with running_worker(worker_settings(redis_url)):
        for job in jobs:
            eventually(lambda job=job: job.get_status() == "failed", "it is refused")  # type: ignore[misc]
    again, gone = jobs

    browser.get(f"{dashboard}0/view/job/{again.id}")
    shows(browser, "failed")
    browser.find_element(By.ID, "requeue-job-btn").click()
    eventually(lambda: SafeJob.fetch(again.id, redis).get_status() == "queued", "it is queued")
    assert again.id.encode() in redis.lrange(keys.rq_queue(keys.DEFAULT_QUEUE), 0, -1)  # type: ignore[operator]

    browser.get(f"{dashboard}0/view/job/{gone.id}")
    shows(browser, "failed")
    browser.find_element(By.ID, "delete-job-btn").click()
    confirm(browser)
    eventually(lambda: not Job.exists(gone.id, redis), "it is deleted")
