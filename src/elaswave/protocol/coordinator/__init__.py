"""The coordinator's machine: decisions about members and layouts, and their durable history."""
