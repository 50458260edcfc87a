"""Pictures for pages and terminals."""
