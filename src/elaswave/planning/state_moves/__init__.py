"""Which blocks move between two layouts, and what that takes."""
