"""The service over HTTP, as OpenAI's API speaks."""
