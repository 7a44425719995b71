"""Contact laws. They know nothing of mechanisms or schemes."""
