"""The user's cache, files written all or nothing, files that grow by lines, YAML."""
