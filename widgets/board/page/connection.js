// The connection to the kernel: whether it is there, and since when it is not.
//
// A kernel that dies or is restarted closes nothing that every front end reports, so
// that silence counts: the kernel sends a beat every 2 s while a page shows the board.

const RENEWAL = 15_000; // ms; for VIEWER_TIMEOUT in feed.py
const CHECK = 1_000; // ms between two looks at the clock
const SILENCE = 10_000; // ms without a message, for BEAT in feed.py

/**
 * Take each message from here on, whether anywidget does or not: it drops all those of a
 * model that has not begun 2 s after its creation, as on a busy machine.
 */
function hear(model) {
  const take = (raw) => {
    const base = Object.getPrototypeOf(Object.getPrototypeOf(raw ?? {}) ?? {});
    if (!base?._handle_comm_msg || !raw.comm?.on_msg) return;
    raw.comm.on_msg((message) => base._handle_comm_msg.call(raw, message));
  };
  // The model itself comes with an event only. The state at the creation was read.
  model.on("change:snapshot", take);
  model.set("snapshot", {});
  model.off("change:snapshot", take);
}

export class Connection {
  constructor(model, expects, onChange) {
    this.model = model;
    hear(model);
    this.expects = expects; // whether the kernel has reason to send beats
    this.onChange = onChange; // called when the kernel is gone, and when it is back
    this.lost = false;
    this.closed = false; // whether the front end says that the channel is closed
    this.heardAt = performance.now();
    this.onClosed = () => this.lose(true);
    // Jupyter's widget manager reports a restart so.
    model.on("comm_live_update", this.onClosed);
  }

  /** Handle a message of any kind: the kernel is there. */
  heard() {
    this.heardAt = performance.now();
    if (!this.lost) return;
    this.lost = this.closed = false;
    this.onChange();
  }

  lose(closed) {
    if (this.lost && this.closed === closed) return;
    const silent = closed ? 0 : performance.now() - this.heardAt;
    if (!this.lost) this.since = new Date(Date.now() - silent);
    this.lost = true;
    this.closed = closed;
    this.onChange();
  }

  send(message) {
    if (this.ended || this.closed) return;
    try {
      this.model.send(message);
    } catch {
      // The front end throws where the channel is closed.
      this.lose(true);
    }
  }

  /** Send what `getMessage` returns now and then, and look whether messages come. */
  open(getMessage) {
    this.heardAt = this.checkedAt = this.sentAt = performance.now();
    this.send(getMessage());
    this.timer = setInterval(() => {
      const now = performance.now();
      // The page slept, as a hidden one may, or the machine: messages are on their way.
      const slept = now - this.checkedAt > 4 * CHECK;
      if (slept && !this.lost) this.heardAt = now;
      this.checkedAt = now;
      if (slept || now - this.sentAt >= RENEWAL) {
        this.sentAt = now;
        this.send({ ...getMessage(), again: 1 });
      }
      if (!this.lost && now - this.heardAt > SILENCE && this.expects()) this.lose(false);
    }, CHECK);
  }

  close() {
    clearInterval(this.timer);
  }

  end() {
    this.close();
    this.ended = true;
    this.model.off("comm_live_update", this.onClosed);
  }

  banner() {
    const since = this.since.toTimeString().slice(0, 8);
    const [title, text] = this.closed
      ? ["No kernel", `The kernel was restarted or has ended at ${since}.`]
      : ["No answer", `Nothing has come from the kernel since ${since}: it has ended, or the connection is lost.`];
    const more = ["The board shows the last state before that."];
    return { mood: "calm", title, text, more };
  }
}
