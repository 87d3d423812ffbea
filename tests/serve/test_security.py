"""Untrusted clients get nothing but indexed pictures, within limits of size and time."""

import hmac
import io
import os
import socket
import struct
import threading
import time
import urllib.error
import urllib.request
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, suppress
from types import SimpleNamespace

import pytest
from PIL import Image, features
from starlette.testclient import TestClient

from nearkin import cli
from nearkin.data.pixels.formats import FORMATS
from nearkin.search.index import create_index
from nearkin.serve import Limits, guard, make_app
from nearkin.serve import pictures as serve_pictures
from nearkin.serve.guard import LOOPBACK

TOKEN = "correct horse battery"


GIF_BOMB = b"GIF89a" + struct.pack("<HH3x", 60_000, 60_000) + b"," + struct.pack("<HHHHBB", 0, 0, 60_000, 60_000, 0, 8)


def client_of(index, model=None, **settings):
    return TestClient(make_app(index, model, **settings), raise_server_exceptions=False)


def png_header(width, height):
    """The start of a PNG file of that size, without its pixels."""
    header = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    chunk = struct.pack(">I", 13) + header + struct.pack(">I", zlib.crc32(header))
    return b"\x89PNG\r\n\x1a\n" + chunk + struct.pack(">I", 9) + b"IDAT" + b"\0" * 13


def encoded(image, kind, **options):
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


# Answers.


def test_every_answer_has_security_headers(index, model):
    with client_of(index, model, token=TOKEN) as client:
        answers = [client.get("/"), client.get(f"/?token={TOKEN}"), client.get("/nothing"), client.get("/app.js")]
        answers += [client.get("/api/about"), client.post("/api/search", content=b"x"), client.get("/openapi.json")]
        assert {a.status_code for a in answers} == {401, 200, 404, 415}
    for answer in answers:
        policy = answer.headers["content-security-policy"]
        assert "default-src 'none'" in policy
        assert "unsafe" not in policy
        assert "http" not in policy
        assert answer.headers["x-content-type-options"] == "nosniff"
        assert answer.headers["referrer-policy"] == "no-referrer"
        assert answer.headers["x-frame-options"] == "DENY"
        assert "cache-control" in answer.headers
        assert "server" not in answer.headers


@pytest.mark.parametrize(
    "path",
    [
        "/../pyproject.toml",
        "/..%2f..%2fetc/passwd",
        "/static/index.html",
        "/%2e%2e/%2e%2e/etc/passwd",
        "//etc/passwd",
        "/etc/passwd",
        "/app.js/../../service.py",
        "/service.py",
    ],
)
def test_no_path_leads_to_a_file(server, path):
    """Sent over a socket, since HTTP clients normalise such paths."""
    host, port = server.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port)), timeout=10) as connection:
        connection.sendall(f"GET {path} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n".encode())
        answer = b"".join(iter(lambda: connection.recv(65536), b""))
    assert b" 404 " in answer.split(b"\r\n")[0]
    assert b"root:" not in answer


def test_only_indexed_files_are_shown(index, model, pictures, tmp_path):
    beside = pictures[0][0].with_name("beside.png")  # a picture in an indexed folder, but not in the index
    Image.new("RGB", (8, 8)).save(beside)
    known = str(pictures[0][0])
    with client_of(index, model) as client:
        for item in (
            str(beside),
            f"{known}/../beside.png",
            "../" * 9 + "etc/passwd",
            "/etc/passwd",
            f"{known}\0.png",
            "",
        ):
            for address in ("/api/picture", "/api/search"):
                assert client.get(address, params={"id": item}).status_code == 404
        assert client.get("/api/picture", params={"id": known}).status_code == 200
    beside.unlink()


def test_file_that_is_not_a_picture_is_never_sent(tmp_path):
    secret = tmp_path / "secret.txt"
    secret.write_text("the secret")
    swapped, linked, gone = (tmp_path / f"{name}.png" for name in ("swapped", "linked", "gone"))
    swapped.write_text("the secret")
    linked.symlink_to(secret)
    paths = [str(swapped), str(linked), str(gone), str(tmp_path)]
    index = create_index(tmp_path / "index", dim=2, space="cosine")
    index.add([[1.0, 0.0]] * 4, paths=paths, labels=[None] * 4)
    with client_of(index) as client:
        for path in paths:
            answer = client.get("/api/picture", params={"id": path})
            assert answer.status_code == 404
            assert b"secret" not in answer.content


# Uploads.


@pytest.mark.parametrize(
    ("data", "status", "words"),
    [
        (png_header(30_000, 30_000), 413, "pixels"),
        (png_header(2**31 - 1, 2**31 - 1), 413, "pixels"),
        (png_header(1001, 1000), 413, "1,001 × 1,000"),
        (GIF_BOMB, 413, "pixels"),
        (b"P6 50000 50000 255\n" + b"\0" * 100, 413, "pixels"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n", 415, "not a picture"),
        (b"<svg xmlns='http://www.w3.org/2000/svg'/>", 415, "not a picture"),
        (b"\0" * 1000, 415, "not a picture"),
        (b"", 400, "no picture"),
    ],
)
def test_bombs_and_odd_files_are_refused_before_decoding(index, model, monkeypatch, data, status, words):
    monkeypatch.setattr(serve_pictures, "decode", lambda *_, **__: pytest.fail("it was decoded"))
    with client_of(index, model, limits=Limits(pixels=1_000_000)) as client:
        answer = client.post("/api/search", content=data)
    assert answer.status_code == status
    assert words in answer.json()["error"]


def crowded(kind):
    """A small picture between very many empty chunks, each of which the decoder reads."""
    data = encoded(Image.new("RGB", (32, 32), "red"), kind)
    end = data.rindex(b"IEND") - 4 if kind == "PNG" else 0
    chunk = struct.pack(">I", 0) + b"abCd" + struct.pack(">I", zlib.crc32(b"abCd"))
    return {
        "PNG": lambda: data[:33] + chunk * 100_000 + data[33:],
        "PNG behind": lambda: data[:end] + chunk * 100_000 + data[end:],
        "JPEG": lambda: data[:2] + b"\xff\xfe\x00\x02" * 100_000 + data[2:],
        "PPM": lambda: b"P6\n" + b"#\n" * 100_000 + data[3:],
    }


@pytest.mark.parametrize("where", ["PNG", "PNG behind", "JPEG", "PPM"])
def test_file_of_very_many_chunks_is_refused(index, model, where):
    data = crowded(where.split()[0])[where]()
    with client_of(index, model) as client:
        answer = client.post("/api/search", content=data)
    assert answer.status_code == 400
    assert "more parts than any honest file" in answer.json()["error"]


def test_a_jpeg_file_with_too_many_scans_is_refused(index, model):
    data = encoded(Image.new("RGB", (64, 64), "red"), "JPEG", progressive=True)
    start = data.rindex(b"\xff\xda")
    scan, end = data[start:-2], data[-2:]
    with client_of(index, model) as client:
        assert client.post("/api/search", content=data).status_code == 200
        answer = client.post("/api/search", content=data[:start] + scan * 200 + end)
    assert answer.status_code == 400
    assert "too many scans" in answer.json()["error"]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_damaged_picture_is_refused(index, model, kind):
    noise = Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3))
    with client_of(index, model) as client:
        answer = client.post("/api/search", content=encoded(noise, kind)[:2000])
    assert answer.status_code == 400
    assert "truncated" in answer.json()["error"] or "decoded" in answer.json()["error"]
    assert "/" not in answer.json()["error"]  # no local path


@pytest.mark.parametrize("kind", FORMATS)
def test_common_formats_are_accepted(index, model, kind):
    if kind == "WEBP" and not features.check("webp"):
        pytest.skip("Pillow was built without WebP.")
    with client_of(index, model) as client:
        data = encoded(Image.new("RGB", (40, 30), "teal"), kind)
        assert client.post("/api/search", content=data).status_code == 200


def test_declared_size_above_the_limit_is_refused(index, model):
    with client_of(index, model, limits=Limits(upload_bytes=1000)) as client:
        answer = client.post("/api/search", content=b"x" * 1001)
        assert answer.status_code == 413
        assert "0.000954 MB" in answer.json()["error"]


def test_declared_size_is_refused_at_once(index, model, live):
    address = live(make_app(index, model, limits=Limits(upload_bytes=1000)))
    connection = slow_upload(address, b"", of=1001)
    assert b" 413 " in connection.recv(1000)  # not 408 after the timeout
    connection.close()


def test_streamed_upload_stops_at_the_limit(index, model, live):
    address = live(make_app(index, model, limits=Limits(upload_bytes=100_000)))
    sent = 0

    def endless():
        nonlocal sent
        while sent < 50_000_000:
            sent += 10_000
            yield b"x" * 10_000

    request = urllib.request.Request(f"{address}/api/search", data=endless(), method="POST")
    with pytest.raises((urllib.error.HTTPError, ConnectionError, urllib.error.URLError)) as caught:
        urllib.request.urlopen(request, timeout=20)
    assert getattr(caught.value, "code", 413) == 413
    assert sent < 40_000_000  # no more than the sockets buffer


def test_all_uploads_together_have_a_limit(index, model, live):
    """While one client uses most of the budget, another gets 503; afterwards it is accepted."""
    address = live(make_app(index, model, limits=Limits(uploads_bytes=30_000, upload_seconds=20)))
    picture = encoded(Image.frombytes("RGB", (64, 64), os.urandom(64 * 64 * 3)), "PNG")
    held = slow_upload(address, b"x" * 25_000, of=60_000)
    assert eventually(lambda: post(address, picture)[0] == 503)
    status, headers = post(address, picture)
    assert (status, headers["Retry-After"]) == (503, "1")
    held.close()
    assert eventually(lambda: post(address, picture)[0] == 200)


# Time.


def slow_upload(address, data, *, of):
    """A connection that has sent part of its upload and waits."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=20)
    head = f"POST /api/search HTTP/1.1\r\nHost: localhost\r\nContent-Length: {of}\r\n\r\n"
    connection.sendall(head.encode() + data)
    return connection


def post(address, data):
    request = urllib.request.Request(f"{address}/api/search", data=data, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return answer.status, answer.headers
    except urllib.error.HTTPError as error:
        return error.code, error.headers


def eventually(condition, seconds=10):
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():
            return True
        time.sleep(0.02)
    return False


def test_slow_clients_block_nobody_and_time_out(index, model, pictures, live):
    address = live(make_app(index, model, limits=Limits(upload_seconds=1.5)))
    slow = [slow_upload(address, b"\x89PNG", of=5000) for _ in range(50)]
    silent = [socket.create_connection(("127.0.0.1", int(address.rsplit(":", 1)[1]))) for _ in range(20)]
    assert post(address, pictures[3][0].read_bytes())[0] == 200
    for connection in slow:
        assert b" 408 " in connection.recv(1000)
        connection.close()
    for connection in silent:
        connection.close()


def silent(address, data=b""):
    """A connection that never completes a request."""
    host, port = address.removeprefix("http://").split(":")
    connection = socket.create_connection((host, int(port)), timeout=10)
    connection.sendall(data)
    return connection


def is_closed(connection):
    try:
        return connection.recv(1000) == b""
    except ConnectionError:
        return True


def test_idle_connections_are_closed(index, live, monkeypatch):
    monkeypatch.setattr("nearkin.serve.server.CHECK_SECONDS", 0.3)
    address = live(make_app(index, None))
    half = b"GET / HTTP/1.1\r\nHost: local"
    whole = b"GET /api/about HTTP/1.1\r\nHost: localhost\r\n\r\n"
    with silent(address) as first, silent(address, half) as second, silent(address, whole + half) as third:
        assert b" 200 " in third.recv(100)
        assert eventually(lambda: is_closed(third))  # after the one complete request
        assert is_closed(first)
        assert is_closed(second)


def test_idle_connections_make_room_for_requests(index, live, monkeypatch):
    monkeypatch.setattr("nearkin.serve.server.MAX_CONNECTIONS", 20)
    address = live(make_app(index, None))
    with ExitStack() as stack:
        crowd = [stack.enter_context(silent(address, b"GET / HT")) for _ in range(60)]
        assert urllib.request.urlopen(f"{address}/api/about", timeout=5).status == 200
        assert is_closed(crowd[0])
        assert is_closed(crowd[39])
        crowd[-1].settimeout(0.1)
        with pytest.raises(TimeoutError):  # the last ones are within the limit and still open
            crowd[-1].recv(1)


@pytest.mark.parametrize("requests", [1, 2])
def test_unread_answer_closes_the_connection(index, live, monkeypatch, requests):
    """An answer larger than the socket buffers, which nobody reads; a second request waits behind it."""
    monkeypatch.setattr("nearkin.serve.server.CHECK_SECONDS", 0.3)
    monkeypatch.setattr("nearkin.serve.map.IndexMap.get", lambda _self: b" " * 20_000_000)
    address = live(make_app(index, None))
    with silent(address, b"GET /api/map HTTP/1.1\r\nHost: localhost\r\n\r\n" * requests) as connection:
        time.sleep(1.5)
        read = 0
        with suppress(ConnectionError):
            while part := connection.recv(2**20):
                read += len(part)
    assert read < 20_000_000


def test_slow_reader_gets_the_whole_answer(index, live, monkeypatch):
    monkeypatch.setattr("nearkin.serve.server.CHECK_SECONDS", 0.2)
    monkeypatch.setattr("nearkin.serve.map.IndexMap.get", lambda _self: b" " * 20_000_000)
    address = live(make_app(index, None))
    read = 0
    with silent(address, b"GET /api/map HTTP/1.1\r\nHost: localhost\r\n\r\n") as connection:
        while read < 20_000_000 and (part := connection.recv(400_000)):
            read += len(part)
            time.sleep(0.02)  # at least a second in total
    assert read >= 20_000_000


def test_large_pictures_do_not_delay_small_ones(index, model, pictures, live, monkeypatch):
    gate, decode = threading.Event(), serve_pictures.decode
    begun = []

    def slow(data, *arguments, **options):
        if len(data) > 3000:
            begun.append(1)
            gate.wait(20)
        return decode(data, *arguments, **options)

    monkeypatch.setattr(serve_pictures, "decode", slow)
    monkeypatch.setattr("nearkin.serve.service.LARGE", 100 * 100)
    address = live(make_app(index, model, limits=Limits(waiting_large=2)))
    large = encoded(Image.frombytes("L", (128, 128), os.urandom(128 * 128)), "PNG")
    with ThreadPoolExecutor(6) as pool:
        asked = [pool.submit(post, address, large) for _ in range(6)]
        assert eventually(lambda: sum(one.done() for one in asked) == 3)  # one is decoded, two wait
        assert begun == [1]
        assert post(address, pictures[3][0].read_bytes())[0] == 200
        gate.set()
        codes = sorted(one.result()[0] for one in asked)
    assert codes == [200] * 3 + [503] * 3


class Held:
    """An index whose searches wait until it is released."""

    def __init__(self, index):
        self.index, self.gate, self.asked = index, threading.Event(), 0

    def __getattr__(self, name):
        return getattr(self.index, name)

    def search(self, *arguments, **options):
        self.asked += 1
        self.gate.wait(20)
        return self.index.search(*arguments, **options)


def test_full_queue_answers_503_with_retry_after(index, model, live):
    held = Held(index)
    address = live(make_app(held, model, limits=Limits(batch=1, waiting=2)))
    picture = encoded(Image.new("L", (32, 32)), "PNG")
    with ThreadPoolExecutor(8) as pool:
        asked = [pool.submit(post, address, picture)]
        assert eventually(lambda: held.asked == 1)  # one is being answered; two more may wait
        asked += [pool.submit(post, address, picture) for _ in range(7)]
        assert eventually(lambda: sum(one.done() for one in asked) >= 5)
        assert urllib.request.urlopen(f"{address}/api/about", timeout=5).status == 200  # others are served meanwhile
        held.gate.set()
        answers = [one.result() for one in asked]
    codes = sorted(status for status, _ in answers)
    assert codes == [200] * 3 + [503] * 5
    assert all(headers["Retry-After"] == "1" for status, headers in answers if status == 503)


def test_slow_answer_times_out(index, model):
    held = Held(index)
    with client_of(held, model, limits=Limits(work_seconds=0.2)) as client:
        answer = client.get("/api/search", params={"id": index.items().ids[0]})
        held.gate.set()
    assert answer.status_code == 503
    assert "too long" in answer.json()["error"]


# Access.


def test_without_the_token_only_the_login_page_is_served(index):
    with client_of(index, token=TOKEN) as client:
        for path in (
            "/",
            "/app.js",
            "/api/about",
            "/api/map",
            "/openapi.json",
            "/docs",
            "/api/picture?id=x",
            "/nothing",
        ):
            answer = client.get(path)
            assert answer.status_code == 401
            assert answer.json() == {"error": "This server needs a token."}
            assert answer.headers["www-authenticate"] == "Bearer"
        page = client.get("/", headers={"accept": "text/html"})
        assert page.status_code == 401
        assert "<form" in page.text
        assert client.get("/style.css").status_code == 200  # for the login page


@pytest.mark.parametrize("wrong", ["", "x", TOKEN[:-1], TOKEN + "x", TOKEN.upper(), "ü" * 30])
def test_wrong_token_is_refused_everywhere(index, wrong):
    with client_of(index, token=TOKEN) as client:
        bearer = client.get("/api/about", headers={"authorization": f"Bearer {wrong}".encode()})
        assert bearer.status_code == 401
        assert client.get("/api/about", params={"token": wrong}, follow_redirects=False).status_code == 401
        assert client.get("/api/about", headers={"cookie": f"nearkin_80={wrong}".encode()}).status_code == 401
        assert client.get("/api/about", headers={"cookie": f"nearkin_80={TOKEN}".encode()}).status_code == 401


def cookie_of(guess):
    return hmac.digest(guess.encode(), b"nearkin", "sha256").hex()


GUESSES = {
    "address": lambda client, guess: client.get("/", params={"token": guess}, follow_redirects=False),
    "header": lambda client, guess: client.get("/api/about", headers={"authorization": f"Bearer {guess}"}),
    "cookie": lambda client, guess: client.get("/api/about", headers={"cookie": f"nearkin_80={cookie_of(guess)}"}),
}


@pytest.mark.parametrize("now", [1e6, 30.5703, 254.6416])  # nine seconds added to the last two come to more
@pytest.mark.parametrize("how", GUESSES)
def test_guessing_tokens_is_slowed(index, monkeypatch, how, now):
    """After ten wrong tokens an address may try one per second, and the right one tells nothing before."""
    monkeypatch.setattr(guard, "time", SimpleNamespace(monotonic=lambda: now))
    app = make_app(index, None, token=TOKEN)
    client, other = (TestClient(app, client=(address, 1)) for address in ("192.0.2.1", "192.0.2.2"))
    guess = GUESSES[how]
    assert [guess(client, f"wrong {n}").status_code for n in range(14)] == [401] * 10 + [429] * 4
    answer = guess(client, TOKEN)
    assert (answer.status_code, answer.headers["retry-after"]) == (429, "1")
    assert client.get("/api/about").json() == {"error": "This server needs a token."}  # nothing was guessed
    assert guess(other, TOKEN).status_code in (200, 303)
    now += 1.01
    assert [guess(client, f"wrong {n}").status_code for n in range(2)] == [401, 429]
    now += 1.01
    assert guess(client, TOKEN).status_code in (200, 303)


def test_clients_are_told_apart_by_network():
    def network(address):
        return guard._network({"client": (address, 1)})

    assert network("2001:db8::1") == network("2001:db8::ffff:2") != network("2001:db8:0:1::1")
    assert network("::ffff:192.0.2.1") != network("::ffff:192.0.2.2")
    assert guard._network({}) == ""


@pytest.mark.parametrize("cookie", [b"a\x01=\x02", b'=;,"\\', b"nearkin_80", b'nearkin_80="\\777', b"\xff=\xfe"])
def test_malformed_cookie_is_ignored(index, cookie):
    with client_of(index, token=TOKEN) as client:
        assert client.get("/api/about", headers={"cookie": cookie}).status_code == 401


def test_token_in_the_header(index):
    with client_of(index, token=TOKEN) as client:
        assert client.get("/api/about", headers={"authorization": f"Bearer {TOKEN}"}).status_code == 200


def test_token_in_the_address_becomes_a_cookie(index):
    with client_of(index, token=TOKEN) as client:
        answer = client.get("/", params={"token": TOKEN, "id": "a&b"}, follow_redirects=False)
        assert answer.status_code == 303
        assert answer.headers["location"] == "/?id=a%26b"
        cookie = answer.headers["set-cookie"]
        assert "HttpOnly" in cookie
        assert "SameSite=lax" in cookie
        assert TOKEN not in cookie
        assert client.get("/api/about").status_code == 200  # the client keeps the cookie


def test_login_never_redirects_to_another_host(index):
    with client_of(index, token=TOKEN) as client:
        request = client.build_request("GET", "http://testserver//evil.example/", params={"token": TOKEN})
        answer = client.send(request, follow_redirects=False)
    assert answer.headers["location"] == "/evil.example/"


def test_other_sites_may_link_but_not_call_the_api(index):
    with client_of(index) as client:
        headers = {"sec-fetch-site": "cross-site"}
        assert client.get("/", headers=headers).status_code == 200
        assert client.get("/api/about", headers=headers).status_code == 403
        assert client.post("/api/search", headers=headers, content=b"x").status_code == 403
        assert client.get("/api/about", headers={"sec-fetch-site": "same-origin"}).status_code == 200


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("127.0.0.1:8000", 200),
        ("localhost", 200),
        ("[::1]:80", 200),
        ("evil.example", 421),
        ("127.0.0.1.evil.example", 421),
    ],
)
def test_loopback_answers_only_to_its_own_names(index, host, status):
    """DNS rebinding: another site's name may point at 127.0.0.1."""
    with client_of(index, hosts=LOOPBACK) as client:
        assert client.get("/api/about", headers={"host": host}).status_code == status


@pytest.mark.parametrize("megabytes", ["nan", "0", "inf"])
def test_invalid_limit_is_refused_before_the_server_starts(megabytes, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["nearkin", "serve", "any.index", "--max-upload-mb", megabytes])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    assert stopped.value.code == 2
    assert "max_upload_mb must be a number above 0" in capsys.readouterr().err
