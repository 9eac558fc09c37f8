"""A server of the Model Context Protocol: the local model as tools for other agents."""
