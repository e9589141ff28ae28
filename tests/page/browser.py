"""A headless Chromium for the tests of the page and its pictures, by way of Debian's chromium-driver."""

import json
import os
import shutil

from selenium import webdriver
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys

WIDE, PHONE = (1180, 900), (390, 844)


class Browser:
    """A window; use it in a with statement. What it asked for and what its console said is kept."""

    def __init__(self, size=WIDE):
        options = webdriver.ChromeOptions()
        options.binary_location = shutil.which("chromium")
        for flag in ("--headless=new", "--disable-gpu", "--hide-scrollbars", "--no-first-run",
                     "--disable-background-networking", "--disable-dev-shm-usage"):
            options.add_argument(flag)
        if os.geteuid() == 0:
            options.add_argument("--no-sandbox")  # Chromium has none for root
        options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
        self.driver = webdriver.Chrome(service=Service(shutil.which("chromedriver")), options=options)
        self.driver.set_script_timeout(60)
        self.size(*size)

    def __enter__(self):
        return self

    def __exit__(self, kind, value, trace):
        self.driver.quit()

    def size(self, width, height, scale=1):
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", {
            "width": width, "height": height, "deviceScaleFactor": scale, "mobile": width < 600})

    def scheme(self, name):
        """light or dark, as the system asks for."""
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {
            "features": [{"name": "prefers-color-scheme", "value": name}]})

    def open(self, url):
        self.driver.get("about:blank")  # a new hash alone would load nothing
        self.driver.get(url)

    def find(self, css):
        return self.driver.find_element(By.CSS_SELECTOR, css)

    def all(self, css):
        return self.driver.find_elements(By.CSS_SELECTOR, css)

    def text(self, css):
        return self.find(css).text

    def run(self, script, *args):
        return self.driver.execute_script(script, *args)

    def fill(self, css, text):
        self.find(css).clear()
        self.find(css).send_keys(text)

    def press(self, *keys):
        """To whatever has the focus."""
        self.driver.switch_to.active_element.send_keys(*keys)

    def focused(self):
        return self.driver.switch_to.active_element

    def console(self):
        """What the console said since it was last asked: errors and warnings."""
        return [entry["message"] for entry in self.driver.get_log("browser")
                if entry["level"] in ("SEVERE", "WARNING")]

    def requests(self):
        """The URLs that the page asked for since that was last asked."""
        urls = []
        for entry in self.driver.get_log("performance"):
            message = json.loads(entry["message"])["message"]
            if message["method"] == "Network.requestWillBeSent":
                urls.append(message["params"]["request"]["url"])
        return urls

    def shot(self, path):
        self.driver.save_screenshot(path)


__all__ = ["Browser", "Keys", "WIDE", "PHONE"]
