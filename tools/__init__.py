"""Programs for developers; a package, so that an installed one of the same name never shadows it."""
