// Keys: which of them are shortcuts, whatever the keyboard's layout types with them.
'use strict';

const IS_APPLE = /^(Mac|iP)/.test(globalThis.navigator?.platform ?? '');
const KINDS_WITHOUT_TEXT = ['button', 'checkbox', 'color', 'file', 'radio', 'range', 'reset', 'submit'];

/** Whether keys that are pressed in an element write into it. */
function takesText(target) {
  return target.tagName === 'TEXTAREA' || Boolean(target.isContentEditable)
    || (target.tagName === 'INPUT' && !KINDS_WITHOUT_TEXT.includes(target.type));
}

/** The letter, A to Z, of a shortcut with Alt; null if the keys are none, or could type a character where they are
 *  pressed. Option types on Apple's keyboards, and AltGr, which some systems report as Ctrl and Alt, on others: in a text
 *  a key that gives another character than its own letter is left to the text. */
function chordOf(event, isApple = IS_APPLE) {
  if (!event.altKey || event.ctrlKey || event.metaKey || event.isComposing) return null;
  const typed = /^[a-z]$/i.test(event.key) ? event.key.toUpperCase() : null;
  if (!takesText(event.target)) return typed ?? letterAt(event);
  return isApple || event.getModifierState('AltGraph') ? null : typed;
}

/** The letter that stands at a key's position on a keyboard of the US; null for other keys. */
function letterAt(event) {
  return /^Key[A-Z]$/.test(event.code) ? event.code.slice(3) : null;
}

/** Whether the keys ask for the list of shortcuts, in which letters alone are shortcuts. */
function asksForKeys(event) {
  return (event.ctrlKey || event.metaKey) && !event.altKey && event.key === '/';
}

/** Whether a key in a text sends it: not while a word is being composed, as in Japanese. */
function sends(event) {
  return event.key === 'Enter' && !event.shiftKey && !event.isComposing && event.target.tagName === 'TEXTAREA';
}
