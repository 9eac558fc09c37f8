// Pictures and sounds that go with the next message: chosen, dropped, pasted, or recorded.
'use strict';

const MOST_ATTACHED_BYTES = 20 << 20;
const SAMPLE_RATE = 16000;

/** The attachments of the message that is being written, each { type, name, data }, data in base64. */
class Attachments {
  constructor(app) {
    this.app = app;
    this.media = [];
    this.recorder = null;
  }

  connect() {
    byId('attach').onclick = () => byId('attach-file').click();
    byId('attach-file').onchange = ({ target }) => {
      this.add([...target.files]);
      target.value = '';
    };
    byId('record').onclick = () => (this.recorder ? this.recorder.stop() : this.record());
    const holdsFiles = (event) => event.dataTransfer?.types.includes('Files');
    addEventListener('dragover', (event) => { if (holdsFiles(event)) event.preventDefault(); });
    addEventListener('drop', (event) => {
      if (!holdsFiles(event)) return;
      event.preventDefault();
      this.add([...event.dataTransfer.files]);
    });
    byId('message').addEventListener('paste', (event) => {
      const files = [...event.clipboardData.files];
      if (!files.length) return;
      event.preventDefault();
      this.add(files);
    });
  }

  /** Show what can be attached for the model that is chosen, and what is attached. */
  show() {
    const reads = kindsOf(this.app.model());
    const types = [...(reads.includes('image') ? ['image/*'] : []), ...(reads.includes('audio') ? ['audio/*'] : [])];
    byId('attach').hidden = !types.length;
    byId('attach-file').accept = types.join(',');
    byId('record').hidden = !reads.includes('audio') || !navigator.mediaDevices?.getUserMedia;
    byId('record').textContent = this.recorder ? 'Stop recording' : 'Record';
    byId('attached').hidden = !this.media.length;
    byId('attached').replaceChildren(...this.media.map((one) => element('li', {}, thumbnail(one),
      button('\u00d7', () => this.remove(one), { 'aria-label': `Remove ${one.name}`, title: 'Remove' }))));
  }

  async add(files) {
    for (const file of files) {
      const type = file.type.split('/')[0];
      if (!kindsOf(this.app.model()).includes(type)) {
        this.app.notice(`${file.name} cannot be read by this model: it reads ${spoken(kindsOf(this.app.model()))}.`);
      } else if (this.size + file.size > MOST_ATTACHED_BYTES) {
        this.app.notice(`${file.name} is too large: ${MOST_ATTACHED_BYTES >> 20} MB can be attached to a message.`);
      } else this.media.push({ type, name: file.name, data: await base64Of(file) });
    }
    this.show();
    byId('message').focus();
  }

  get size() {
    return this.media.reduce((sum, { data }) => sum + data.length * 0.75, 0);
  }

  remove(one) {
    this.media = this.media.filter((other) => other !== one);
    this.show();
    byId('message').focus();
  }

  /** What is attached, which is nothing afterwards. */
  take() {
    const { media } = this;
    this.media = [];
    this.show();
    return media;
  }

  /** Attach it again, as the message was not sent. */
  giveBack(media) {
    this.media = [...media, ...this.media];
    this.show();
  }

  /** Record from the microphone until the button is pressed again. */
  async record() {
    try {
      const stream = await navigator.mediaDevices.getUserMedia({ audio: true });
      const pieces = [];
      this.recorder = new MediaRecorder(stream);
      this.recorder.ondataavailable = ({ data }) => pieces.push(data);
      this.recorder.onstop = async () => {
        this.recorder = null;
        for (const track of stream.getTracks()) track.stop();
        const wave = await waveOf(new Blob(pieces));
        await this.add([new File([wave], 'recording.wav', { type: 'audio/wav' })]);
      };
      this.recorder.start();
    } catch (error) {
      this.app.notice(`The microphone cannot be used: ${error.message}`);
    }
    this.show();
  }
}

/** Kinds of attachments that a model reads. */
function kindsOf(model) {
  const has = (name) => Boolean(model?.capabilities.includes(name));
  return [...(has('vision') ? ['image'] : []), ...(has('audio') ? ['audio'] : [])];
}

const spoken = (kinds) => ['text', ...kinds.map((kind) => (kind === 'image' ? 'pictures' : 'sounds'))].join(' and ');

/** A picture in small, or the name of a sound. */
function thumbnail({ type, name, data }) {
  if (type !== 'image') return element('span', { className: 'sound', textContent: name || 'sound' });
  return element('img', { className: 'thumbnail', alt: name || 'picture', title: name, src: `data:;base64,${data}` });
}

async function base64Of(file) {
  const bytes = new Uint8Array(await file.arrayBuffer());
  const pieces = [];
  // As many arguments as every browser takes.
  for (let at = 0; at < bytes.length; at += 0x6000) pieces.push(String.fromCharCode(...bytes.subarray(at, at + 0x6000)));
  return btoa(pieces.join(''));
}

/** A recording in the browser's own form as a WAV file: 16 kHz, one channel, 16 bits. */
async function waveOf(blob) {
  const recorded = await blob.arrayBuffer();
  const decoder = new AudioContext();
  const decoded = await decoder.decodeAudioData(recorded).finally(() => decoder.close());
  const context = new OfflineAudioContext(1, Math.max(1, Math.ceil(decoded.duration * SAMPLE_RATE)), SAMPLE_RATE);
  const source = context.createBufferSource();
  source.buffer = decoded;
  source.connect(context.destination);
  source.start();
  return waveFile((await context.startRendering()).getChannelData(0));
}

/** Samples from -1 to 1 as the bytes of a WAV file. */
function waveFile(samples) {
  const view = new DataView(new ArrayBuffer(44 + 2 * samples.length));
  const text = (at, letters) => [...letters].forEach((letter, index) => view.setUint8(at + index, letter.charCodeAt(0)));
  text(0, 'RIFF');
  view.setUint32(4, 36 + 2 * samples.length, true);
  text(8, 'WAVEfmt ');
  view.setUint32(16, 16, true);
  view.setUint16(20, 1, true);
  view.setUint16(22, 1, true);
  view.setUint32(24, SAMPLE_RATE, true);
  view.setUint32(28, 2 * SAMPLE_RATE, true);
  view.setUint16(32, 2, true);
  view.setUint16(34, 16, true);
  text(36, 'data');
  view.setUint32(40, 2 * samples.length, true);
  samples.forEach((sample, index) => view.setInt16(44 + 2 * index, Math.max(-1, Math.min(1, sample)) * 0x7fff, true));
  return view.buffer;
}
