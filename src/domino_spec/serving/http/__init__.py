"""The service over HTTP: OpenAI's API, health, metrics and the page."""
