"""Modules in the place of other projects' native modules, on gpumux's memory."""
