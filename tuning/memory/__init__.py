"""Memory: what a configuration needs, what a card has, and what trials taught us about both."""
