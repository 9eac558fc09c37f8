"""Tokenization of long texts, and n-gram drafts."""
