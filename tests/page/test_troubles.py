"""What a person sees when something is in the way: a server that is gone, full, or asks for a key; another port."""

import socket
import threading
import time

import requests

from browser import Keys
from server_harness import UNBOUNDED, Server, eventually, free_port
from test_views import opened, score, spans, write, written


def trouble(browser):
    eventually(lambda: browser.find("#trouble").is_displayed(), "what is wrong is said")
    return browser.text("#trouble")


def test_a_server_that_is_gone_and_comes_back(browser):
    browser.refusals = ["ERR_CONNECTION_REFUSED"]
    port = free_port()
    with Server("--port", str(port)) as s:
        opened(browser, s, "score")
        score(browser, "A small text.")
    browser.find("#score-go").click()
    assert "The server does not answer." in trouble(browser)
    assert browser.text("#state") == "no answer"
    assert written(browser, "score-text") == "A small text.", "what was there stays"
    with Server("--port", str(port)):
        eventually(lambda: not browser.find("#trouble").is_displayed(), "the page goes on")
        eventually(lambda: browser.text("#state").startswith("pkmserve "), "and says so")
        score(browser, "Another text.")
        assert written(browser, "score-text") == "Another text."


def test_a_server_that_is_killed_while_it_writes(browser):
    browser.refusals = ["ERR_CONNECTION_REFUSED", "ERR_INCOMPLETE_CHUNKED_ENCODING"]
    with Server(model=UNBOUNDED) as s:
        opened(browser, s, "write")
        browser.fill("#write-max", "100000")
        browser.find("#write-go").click()
        eventually(lambda: len(spans(browser, "write-text")) > 3, "some text")
        s.process.kill()
        s.process.wait()
    assert "The server does not answer." in trouble(browser)
    assert len(spans(browser, "write-text")) > 3 and browser.find("#write-go").is_enabled()


def test_escape_stops_the_text_and_the_work(browser):
    with Server(model=UNBOUNDED) as s:
        opened(browser, s, "write")
        browser.fill("#write-max", "100000")
        browser.find("#write-prompt").send_keys(Keys.CONTROL, Keys.ENTER)
        eventually(lambda: len(spans(browser, "write-text")) > 3, "some text")
        browser.find("#write-prompt").send_keys(Keys.ESCAPE)
        eventually(lambda: "stopped" in browser.text("#write-state"), "it stops")
        eventually(lambda: s.metric("num_requests_running") == 0, "the server does not go on")
        assert not browser.find("#trouble").is_displayed(), "who stops it knows"
        write(browser, max=5)


def test_a_server_that_is_full(browser):
    browser.refusals = ["429"]
    with Server("--max-client-requests", "1", model=UNBOUNDED) as s:
        opened(browser, s, "score")
        body = {"prompt": "a", "max_tokens": 100000, "ignore_eos": True, "stream": True}
        with requests.post(s.url + "/generate", json=body, stream=True) as running:
            lines = running.iter_lines()  # held, or its end would end the request
            next(lines)
            browser.find("#score-go").click()
            said = trouble(browser)
        assert "The server is busy" in said and "--max-client-requests" in said and "Try again in" in said
        assert browser.find("#score-go").is_enabled()
        eventually(lambda: s.metric("num_requests_running") == 0, "room again")
        score(browser, "A small text.")
        assert not browser.find("#trouble").is_displayed(), "what is over is taken away"


def test_what_the_server_refuses_is_told_in_its_words(browser, server):
    browser.refusals = ["400"]
    opened(browser, server, "write")
    browser.fill("#write-max", "100000")
    browser.find("#write-go").click()
    said = trouble(browser)
    assert "The server refused the request." in said and "max_tokens" in said
    browser.find("#trouble-close").click()
    assert not browser.find("#trouble").is_displayed()


def test_a_key_is_asked_for_and_kept_in_the_tab_alone(browser, tmp_path):
    browser.refusals = ["401"]
    (tmp_path / "keys").write_text("secret\n")
    with Server("--api-key-file", str(tmp_path / "keys")) as s:
        browser.open(s.url + "/#score")
        eventually(lambda: browser.find("#key-form").is_displayed(), "the page asks for a key")
        assert browser.focused().get_attribute("id") == "key"
        browser.press("wrong" + Keys.ENTER)
        eventually(lambda: "refused" in browser.text("#key-form label"), "the wrong key is refused")
        assert "API key" in trouble(browser)
        browser.press("secret" + Keys.ENTER)
        eventually(lambda: not browser.find("#key-form").is_displayed(), "the right key is taken")
        score(browser, "A small text.")
        assert not browser.find("#trouble").is_displayed()
        kept = browser.run("return [JSON.stringify(sessionStorage), JSON.stringify(localStorage), document.cookie]")
        assert "secret" in kept[0] and kept[1:] == ["{}", ""]
        assert browser.find("#key").get_attribute("value") == ""
        browser.open(s.url + "/#score")
        eventually(lambda: browser.text("#served") != "", "a reload keeps it")
        browser.driver.switch_to.new_window("tab")
        browser.open(s.url + "/#score")
        eventually(lambda: browser.find("#key-form").is_displayed(), "another tab does not have it")
        browser.driver.close()
        browser.driver.switch_to.window(browser.driver.window_handles[0])
        browser.find("#forget").click()
        eventually(lambda: browser.find("#key-form").is_displayed(), "it is forgotten")
        assert browser.run("return sessionStorage.length") == 0


def test_a_key_is_typed_in_peace_while_figures_are_asked_for(browser, tmp_path):
    browser.refusals = ["401"]
    (tmp_path / "keys").write_text("secret\n")
    with Server("--api-key-file", str(tmp_path / "keys"), "--metrics-auth") as s:
        browser.open(s.url + "/#now")
        eventually(lambda: browser.find("#key-form").is_displayed(), "the page asks for a key")
        for letter in "secret":  # longer than the two seconds after which the view asks again
            browser.press(letter)
            time.sleep(0.5)
        browser.press(Keys.ENTER)
        eventually(lambda: not browser.find("#key-form").is_displayed(), "the key is taken")
        eventually(lambda: browser.find("#now-plots").is_displayed(), "and the figures come")


def test_an_overlay_that_is_gone_is_not_a_port_that_is_wrong(browser, server):
    browser.refusals = ["404"]
    browser.open(server.url + "/#write")
    eventually(lambda: browser.text("#served") != "", "the page has loaded")
    for path, what in (("v1/models/none", "not here"), ("nowhere", "not at this port")):
        browser.run("ask(arguments[0]).catch(troubleShow)", path)
        eventually(lambda: what in trouble(browser), what)  # noqa: B023


def test_a_key_that_is_taken_back_while_the_page_is_open(browser, tmp_path):
    browser.refusals = ["401"]
    (tmp_path / "keys").write_text("secret\n")
    with Server("--api-key-file", str(tmp_path / "keys")) as s:
        browser.open(s.url + "/#score")
        eventually(lambda: browser.find("#key-form").is_displayed(), "the page asks for a key")
        browser.press("secret" + Keys.ENTER)
        eventually(lambda: browser.text("#served") != "", "the key is taken")
        (tmp_path / "keys").write_text("other\n")
        s.process.send_signal(1)
        eventually(lambda: requests.get(s.url + "/info", headers={"Authorization": "Bearer other"}).status_code == 200,
                   "the keys are read again")
        browser.find("#score-go").click()
        eventually(lambda: browser.find("#key-form").is_displayed(), "the page asks again")
        assert "refused" in browser.text("#key-form label")


def test_figures_at_the_admin_port_and_work_at_the_other(browser):
    browser.refusals = ["404"]
    admin = free_port()
    with Server("--admin-port", str(admin), wait=False) as s:
        s.port = eventually(lambda: s.find_port(other_than=admin), "the other port")
        s.url = "http://127.0.0.1:%d" % s.port
        s.wait_ready()
        opened(browser, s, "now")
        eventually(lambda: "--admin-port" in browser.text("#now-state"), "where the figures are")
        assert not browser.find("#now-plots").is_displayed()
        browser.open("http://127.0.0.1:%d/" % admin)
        eventually(lambda: browser.all(".plot"), "the plots")
        eventually(lambda: browser.text("#served") == "admin port", "which port this is")
        for view in ("write", "score"):
            browser.find("#tab-" + view).click()
            eventually(lambda: "does no work" in browser.text("#view-" + view), "where the work is done")
            assert browser.all("#view-%s button" % view) == []


def test_a_server_that_is_still_loading(browser, server):
    """Answers as a loading server gives them, from a port of this test's own, and then the real ones."""
    browser.refusals = ["503"]
    page = {path: requests.get(server.url + path, headers={"Accept": "text/html"}) for path in
            ("/", "/ui/page.js", "/ui/page.css", "/ui/icon.svg", "/version", "/info", "/v1/models")}
    asked = []
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)

    def answer(connection):
        with connection:
            path = connection.recv(65536).split(b" ")[1].decode()
            asked.append(path)
            status, body, kind = 200, b'{"status":"loading","progress":0.25}', "application/json"
            if path == "/info" and asked.count(path) < 3:
                status, body = 503, b'{"error":{"message":"the model is being loaded","code":"model_loading"}}'
            elif path in page:
                body, kind = page[path].content, page[path].headers["Content-Type"]
            connection.sendall(b"HTTP/1.1 %d X\r\nContent-Type: %s\r\nContent-Length: %d\r\nConnection: close\r\n\r\n%s"
                               % (status, kind.encode(), len(body), body))

    def serve():
        while True:
            try:
                connection = listener.accept()[0]
            except OSError:
                return
            threading.Thread(target=answer, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        browser.open("http://127.0.0.1:%d/#score" % listener.getsockname()[1])
        seen = set()
        eventually(lambda: seen.add(browser.text("#state")) or browser.text("#served") != "", "it is loaded")
        assert any("loading the model, 25.0 %" in text for text in seen), seen
    finally:
        listener.close()
