"""Pages of pods over real sockets: in order, together, and without those that don't answer."""

from __future__ import annotations

import asyncio
import socket
import time

from dcp_connector.httpd import HttpServer, text
from dcp_operator.pod_pages import PodPages
from tests.support.redirects import redirecting

HOST = "127.0.0.1"


def test_pages_come_in_the_order_of_their_urls_and_those_that_can_not_be_had_are_empty() -> None:
    server = HttpServer(HOST, 0, lambda path: text(404 if path == "/none" else 200, f"page {path}"), "pod")
    with socket.create_server((HOST, 0)) as frozen, socket.socket() as closed:
        closed.bind((HOST, 0))
        ports = [server.port, frozen.getsockname()[1], closed.getsockname()[1]]
        urls = [f"http://{HOST}:{port}{path}" for port, path in zip(ports, ("/a", "/x", "/y"), strict=True)]
        urls += [f"http://{HOST}:{server.port}/none", f"http://{HOST}:{server.port}/b"]
        try:
            assert asyncio.run(PodPages().read(urls)) == ["page /a\n", "", "", "", "page /b\n"]
        finally:
            server.close()


def test_a_page_that_redirects_is_none_and_nobody_else_is_asked() -> None:
    with redirecting() as (url, elsewhere):
        assert asyncio.run(PodPages().read([url])) == [""]
        assert elsewhere == []


def test_many_that_never_answer_take_no_longer_than_one_and_are_not_waited_for_again() -> None:
    now = [0.0]
    with socket.create_server((HOST, 0), backlog=64) as frozen:
        urls = [f"http://{HOST}:{frozen.getsockname()[1]}/{number}" for number in range(30)]
        pages = PodPages(clock=lambda: now[0])

        async def took() -> float:
            start = time.monotonic()
            assert await pages.read(urls) == [""] * 30
            return time.monotonic() - start

        # One after the other they would take 30 s.
        assert asyncio.run(took()) < 10
        assert asyncio.run(took()) < 0.9
        now[0] = 61.0
        assert asyncio.run(took()) >= 0.9, "after a while they are asked again"
