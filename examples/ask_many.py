"""Asks many questions at once from asyncio; each waits for its own answer."""

import asyncio
import os

from redis import Redis
from redis.asyncio import Redis as AsyncRedis

from queue_service.client import async_wait, enqueue_chat

URL = os.environ["QSVC_REDIS_URL"]


async def ask(connection: Redis, waiting: AsyncRedis, text: str) -> str:
    body = {"messages": [{"role": "user", "content": text}], "temperature": 0, "max_tokens": 8}
    job_id = await asyncio.to_thread(enqueue_chat, connection, body)
    result = await async_wait(waiting, job_id, timeout_seconds=120)
    if result.body is None:
        raise RuntimeError(f"{job_id} is {result.status}: {result.error}")
    return result.body["choices"][0]["message"]["content"]


async def main() -> None:
    questions = [f"What is {n} plus {n}?" for n in range(5)]
    with Redis.from_url(URL) as connection:
        async with AsyncRedis.from_url(URL) as waiting:
            asked = (ask(connection, waiting, text) for text in questions)
            for question, answer in zip(questions, await asyncio.gather(*asked), strict=True):
                print(f"{question} {answer}")


asyncio.run(main())
