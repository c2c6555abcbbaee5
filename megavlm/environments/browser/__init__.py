"""A real browser as the screen of episodes: headless Chromium, driven by Playwright."""
