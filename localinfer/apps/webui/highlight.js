// Highlighting: line by line, so that a line that was shown stays as it is.
'use strict';

const KEYWORDS = new Set(
  ('abstract and as assert async await begin bool boolean break byte case catch char class const continue '
  + 'crate def default defer del delete do done double echo elif else elsif end enum except export extends '
  + 'extern false False fi final finally float fn for foreach from func function global go goto if impl '
  + 'implements import in include instanceof int interface is lambda let local long loop match mod module '
  + 'mut namespace new nil None nonlocal not null or override package pass private protected pub public '
  + 'raise ref require return self short signed sizeof static string struct super switch template then this '
  + 'throw throws trait true True try type typedef typeof undefined union unless unsigned until use using '
  + 'var virtual void volatile where while with yield SELECT FROM WHERE INSERT INTO VALUES UPDATE SET DELETE '
  + 'CREATE TABLE JOIN LEFT INNER ON GROUP ORDER BY HAVING LIMIT AND OR NOT NULL AS DISTINCT UNION PRIMARY '
  + 'KEY').split(' '));
const COMMENTS = {
  hash: ['#.*', 'bash sh shell zsh fish python py ruby rb yaml yml toml ini r perl make makefile dockerfile julia '
    + 'elixir'],
  dash: ['--.*', 'sql lua haskell hs ada elm'],
  slash: ['//.*|/\\*', 'c h cpp c++ cc cs csharp java js javascript jsx ts typescript tsx json go rust rs swift '
    + 'kotlin kt scala php dart css scss zig'],
};
const MULTILINE = { '/*': '*/', '"""': '"""', "'''": "'''" };

/** The expression that finds the tokens of a language, or null for text and languages that are not known. */
function tokensOf(language) {
  const found = Object.values(COMMENTS).find(([, names]) => names.split(' ').includes(language.toLowerCase()));
  if (!found) return null;
  const strings = '"""|\'\'\'|"(?:[^"\\\\]|\\\\.)*"|\'(?:[^\'\\\\]|\\\\.)*\'|`(?:[^`\\\\]|\\\\.)*`';
  const rest = '(?<number>\\b\\d[\\w.]*)|(?<word>[A-Za-z_]\\w*)';
  return new RegExp(`(?<comment>${found[0]})|(?<string>${strings})|${rest}`, 'g');
}

/** Append a line to a parent in colours; `until`: what ends a string or comment that began in a line before. */
function highlight(parent, line, tokens, until = null) {
  if (!tokens) {
    parent.append(line);
    return null;
  }
  let done = 0;
  const put = (end, kind) => {
    const text = line.slice(done, end);
    if (text) parent.append(kind ? element('span', { className: kind, textContent: text }) : text);
    done = end;
  };
  const closed = (start) => {
    const at = line.indexOf(until, start);
    put(at < 0 ? line.length : at + until.length, until === '*/' ? 'comment' : 'string');
    if (at >= 0) until = null;
  };
  if (until) closed(0);
  tokens.lastIndex = done;
  for (let found; !until && (found = tokens.exec(line));) {
    const { comment, string, number, word } = found.groups;
    const kind = comment ? 'comment' : string ? 'string' : number ? 'number' : KEYWORDS.has(word) ? 'keyword' : null;
    if (!kind) continue;
    put(found.index);
    until = MULTILINE[found[0]] ?? null;
    if (until) closed(tokens.lastIndex);
    else put(tokens.lastIndex, kind);
    tokens.lastIndex = Math.max(done, tokens.lastIndex);
  }
  put(line.length);
  return until;
}
