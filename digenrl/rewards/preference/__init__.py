"""Models of what people prefer."""
