"""Two hundred concurrent searches: each gets its own answer."""

import asyncio
from concurrent.futures import ThreadPoolExecutor

import httpx
import numpy as np

CLIENTS = 200


def test_two_hundred_concurrent_searches_are_answered(server, index, model, pictures, shown):
    files = [path for path, _ in pictures][:CLIENTS]
    data = [path.read_bytes() for path in files]
    expected = index.search(model.embed(files).numpy(), 5)

    async def ask() -> list[httpx.Response]:
        limits = httpx.Limits(max_connections=CLIENTS)
        async with httpx.AsyncClient(base_url=server, limits=limits, timeout=60, trust_env=False) as client:

            def one(number: int):
                row = number % len(files)
                if number % 4:
                    return client.post("/api/search", params={"k": 5}, content=data[row])
                return client.get("/api/search", params={"k": 5, "id": str(files[row])})

            return await asyncio.gather(*(one(number) for number in range(CLIENTS)))

    with ThreadPoolExecutor(1) as thread:  # Playwright may have left an event loop in this thread
        answers = thread.submit(lambda: asyncio.run(ask())).result()
    assert [answer.status_code for answer in answers] == [200] * CLIENTS
    for number, answer in enumerate(answers):
        row, hits = number % len(files), answer.json()["hits"]
        if number % 4:
            assert [hit["id"] for hit in hits] == [shown(hit.id) for hit in expected[row]]
            np.testing.assert_allclose(
                [hit["similarity"] for hit in hits], [hit.similarity for hit in expected[row]], atol=1e-5
            )
        else:
            assert answer.json()["query"]["id"] == shown(files[row])
            assert len(hits) == 5
