"""Debian's chromium for the tests, driven by selenium, which is in an environment of its own."""

import contextlib
import json
import shutil
import site
import tempfile
import time

from tests.environments import apt_install, programs

PACKAGES = {"chromium": "chromium", "chromedriver": "chromium-driver"}  # program -> the package of Debian
OTHERS = {"chromium": "google-chrome"}  # what there may be instead of a program
OPTIONS = (
    *("headless", "no-sandbox", "disable-gpu", "disable-quic", "no-first-run", "disable-background-networking"),
    *("disable-component-update", "disable-sync", "disable-dev-shm-usage", "hide-scrollbars"),
)


def program(name):
    return shutil.which(name) or shutil.which(OTHERS.get(name, name))


def install():
    """Install the packages that are missing."""
    missing = sorted(package for name, package in PACKAGES.items() if not program(name))
    if missing:
        apt_install(missing)


def selenium():
    """The module selenium.webdriver."""
    home = programs("browser").parent
    site.addsitedir(str(next(home.glob("lib/python*/site-packages"))))  # behind our own packages
    from selenium import webdriver

    return webdriver


class Browser:
    """A chromium with one page."""

    def __init__(self):
        install()
        webdriver = selenium()
        self.stack = contextlib.ExitStack()
        with self.stack:
            profile = tempfile.mkdtemp()
            self.stack.callback(shutil.rmtree, profile, ignore_errors=True)  # as the browser may still write to it
            options = webdriver.ChromeOptions()
            options.binary_location = program("chromium")
            for option in (*OPTIONS, f"user-data-dir={profile}"):
                options.add_argument(f"--{option}")
            options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
            service = webdriver.ChromeService(program("chromedriver"))
            self.driver = webdriver.Chrome(options=options, service=service)
            self.stack.callback(self.driver.quit)
            self.driver.set_page_load_timeout(60)
            self.driver.set_script_timeout(300)
            self.show()
            self.stack = self.stack.pop_all()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.stack.close()

    def show(self, width=1280, dark=False, media="", language="en-US"):
        """The width of the window in pixels, the colours and the language of the user; media: "print" or the screen."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
        self.driver.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", size)
        user = {"userAgent": "", "acceptLanguage": language}  # "" keeps the name of the browser
        self.driver.execute_cdp_cmd("Emulation.setUserAgentOverride", user)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": [scheme]})

    def open(self, path, view=""):
        """A file, afresh; view: what its address ends with, such as "#ranks=2"."""
        self.driver.get("about:blank")  # else only what follows the # would change
        self.driver.get(f"{path.as_uri()}{view}")

    def run(self, script, *arguments):
        return self.driver.execute_script(script, *arguments)

    def all(self, selector):
        return self.driver.find_elements("css selector", selector)

    def one(self, selector):
        [element] = self.all(selector)
        return element

    def text(self, selector):
        return self.run("return arguments[0].innerText", self.one(selector))  # selenium's text looks at every node

    def press(self, *keys):
        """Keys of selenium.webdriver.Keys, by name, to what has the focus."""
        names = selenium().Keys
        self.driver.switch_to.active_element.send_keys(*(getattr(names, key) for key in keys))

    def view(self):
        """What the address ends with."""
        return self.run("return location.hash")

    def wait_for(self, condition, what, seconds=30):
        deadline = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < deadline, f"timed out after {seconds} s, waiting for {what}"
            time.sleep(0.02)

    def errors(self):
        """What the console says."""
        return [entry["message"] for entry in self.driver.get_log("browser")]

    def requests(self):
        """The addresses that pages have asked for since the last call; not the browser's own first page."""
        messages = [json.loads(entry["message"])["message"] for entry in self.driver.get_log("performance")]
        sent = [one["params"] for one in messages if one["method"] == "Network.requestWillBeSent"]
        return [one["request"]["url"] for one in sent if not one["documentURL"].startswith("chrome://")]
