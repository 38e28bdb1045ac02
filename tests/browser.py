"""The browser of the tests that need one: headless, and speaking to nobody."""

import shutil

ARGUMENTS = (
    "--no-sandbox",
    "--disable-gpu",
    # What draws pages where there is no GPU: a thread of the browser, not one more process.
    "--in-process-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
)
BROWSERS = ("chromium", "chromium-browser", "google-chrome")


def find_browser() -> str | None:
    return next(filter(None, map(shutil.which, BROWSERS)), None)
