# ruff: noqa: RUF001  # letters of other alphabets
"""Prompts in other languages than English: conversation, questions, sums, code, translation."""

import random

from words import NAMES

_TOPICS = {
    "de": "die Photosynthese|schwarze Löcher|die Inflation|der Wald|das Immunsystem|Windräder|die Römer|Kaffee|Schach|das Internet|Vulkane|die Demokratie|Datenbanken|Rekursion|das Brotbacken|der Schlaf|die Börse|Elektroautos|Bienen|der Mond|Versionskontrolle|neuronale Netze|das Fahrrad|Gedichte|der Klimawandel",
    "fr": "la photosynthèse|les trous noirs|l'inflation|la forêt|le système immunitaire|les éoliennes|les Romains|le café|les échecs|Internet|les volcans|la démocratie|les bases de données|la récursivité|le pain|le sommeil|la bourse|les voitures électriques|les abeilles|la Lune|le contrôle de version|les réseaux de neurones|le vélo|la poésie|le climat",
    "es": "la fotosíntesis|los agujeros negros|la inflación|el bosque|el sistema inmunitario|los molinos de viento|los romanos|el café|el ajedrez|internet|los volcanes|la democracia|las bases de datos|la recursión|el pan|el sueño|la bolsa|los coches eléctricos|las abejas|la Luna|el control de versiones|las redes neuronales|la bicicleta|la poesía|el clima",
    "ru": "фотосинтез|чёрные дыры|инфляция|лес|иммунная система|ветряные электростанции|Древний Рим|кофе|шахматы|интернет|вулканы|демократия|базы данных|рекурсия|выпечка хлеба|сон|фондовый рынок|электромобили|пчёлы|Луна|системы контроля версий|нейронные сети|велосипед|поэзия|изменение климата",
    "zh": "光合作用|黑洞|通货膨胀|森林|免疫系统|风力发电|古罗马|咖啡|国际象棋|互联网|火山|民主|数据库|递归|烤面包|睡眠|股票市场|电动汽车|蜜蜂|月球|版本控制|神经网络|自行车|诗歌|气候变化",
    "ja": "光合成|ブラックホール|インフレーション|森林|免疫システム|風力発電|古代ローマ|コーヒー|チェス|インターネット|火山|民主主義|データベース|再帰|パン作り|睡眠|株式市場|電気自動車|ミツバチ|月|バージョン管理|ニューラルネットワーク|自転車|詩|気候変動",
}  # fmt: skip
_TALK = {
    "de": "Erkläre mir einfach: {t}.|Was sollte man wissen über: {t}?|Schreibe einen kurzen Text zum Thema {t}.|Nenne fünf Fakten zum Thema {t}.|Vor- und Nachteile: {t}?|Schreibe ein Gedicht. Thema: {t}.|Vergleiche {t} und {u}.|Schreibe eine E-Mail an {n} zum Thema {t}.|Gib mir drei Tipps für Anfänger. Thema: {t}.|Ist {t} wichtig? Begründe deine Meinung.|Fasse in zwei Sätzen zusammen, worum es geht: {t}.",
    "fr": "Explique simplement : {t}.|Que faut-il savoir sur {t} ?|Écris un court texte sur {t}.|Donne cinq faits sur {t}.|Quels sont les avantages et les inconvénients : {t} ?|Écris un poème sur {t}.|Compare {t} et {u}.|Écris un courriel à {n} au sujet suivant : {t}.|Donne trois conseils à un débutant : {t}.|Pourquoi {t}, est-ce important ?|Résume en deux phrases : {t}.",
    "es": "Explica de forma sencilla: {t}.|¿Qué hay que saber sobre {t}?|Escribe un texto corto sobre {t}.|Di cinco datos sobre {t}.|¿Cuáles son las ventajas y desventajas de esto: {t}?|Escribe un poema sobre {t}.|Compara {t} y {u}.|Escribe un correo a {n} sobre {t}.|Da tres consejos a un principiante: {t}.|¿Por qué es importante este tema: {t}?|Resume en dos frases: {t}.",
    "ru": "Объясни простыми словами: {t}.|Что нужно знать на тему «{t}»?|Напиши короткий текст на тему «{t}».|Назови пять фактов: {t}.|Плюсы и минусы: {t}.|Напиши стихотворение. Тема: {t}.|Сравни: {t} и {u}.|Напиши письмо коллеге. Тема: {t}.|Дай три совета новичку: {t}.|Почему это важно: {t}?|Кратко, в двух предложениях: {t}.",
    "zh": "请用简单的话解释{t}。|关于{t},我需要知道什么?|写一篇关于{t}的短文。|列出关于{t}的五个事实。|{t}有哪些优点和缺点?|写一首关于{t}的诗。|比较{t}和{u}。|给同事写一封关于{t}的邮件。|给{t}的初学者三条建议。|为什么{t}很重要?|用两句话概括{t}。",
    "ja": "{t}を簡単に説明してください。|{t}について知っておくべきことは何ですか。|{t}についての短い文章を書いてください。|{t}に関する事実を五つ挙げてください。|{t}の長所と短所は何ですか。|{t}についての詩を書いてください。|{t}と{u}を比較してください。|{t}について同僚へのメールを書いてください。|{t}の初心者に三つの助言をください。|なぜ{t}は重要なのですか。|{t}を二文で要約してください。",
}  # fmt: skip
_SUMS = {
    "de": "{n} kauft {a} Hefte zu je {b} Euro und bezahlt mit {c} Euro. Wie viel Geld bekommt {n} zurück?|Ein Zug fährt {c} km in {b} Stunden. Wie weit kommt er in {a} Stunden?|Löse die Gleichung {a}x + {b} = {c}.",
    "fr": "{n} achète {a} cahiers à {b} euros et paie avec {c} euros. Combien lui rend-on ?|Un train parcourt {c} km en {b} heures. Quelle distance en {a} heures ?|Résous l'équation {a}x + {b} = {c}.",
    "es": "{n} compra {a} cuadernos a {b} euros y paga con {c} euros. ¿Cuánto le devuelven?|Un tren recorre {c} km en {b} horas. ¿Cuánto recorre en {a} horas?|Resuelve la ecuación {a}x + {b} = {c}.",
    "ru": "Тетрадь стоит {b} рублей. Сколько сдачи получат с {c} рублей за {a} тетрадей?|Поезд проезжает {c} км за {b} ч. Сколько он проедет за {a} ч?|Реши уравнение {a}x + {b} = {c}.",
    "zh": "小明买了{a}本练习本,每本{b}元,付了{c}元。应找回多少钱?|一列火车{b}小时行驶{c}公里,{a}小时能行驶多远?|解方程 {a}x + {b} = {c}。",
    "ja": "ノート1冊{b}円を{a}冊買い、{c}円を払いました。おつりはいくらですか。|電車は{b}時間で{c}km進みます。{a}時間では何km進みますか。|方程式 {a}x + {b} = {c} を解いてください。",
}  # fmt: skip
_CODE = {
    "de": "Schreibe eine Funktion in {l}, die {g}.|Zeige ein Beispiel in {l}: eine Funktion, die {g}.",
    "fr": "Écris une fonction en {l} qui {g}.|Montre un exemple en {l} d'une fonction qui {g}.",
    "es": "Escribe una función en {l} que {g}.|Muestra un ejemplo en {l} de una función que {g}.",
    "ru": "Напиши функцию на {l}, которая {g}.|Покажи пример на {l}: функция, которая {g}.",
    "zh": "用{l}写一个函数,{g}。|请用{l}举例说明如何{g},并加上注释。",
    "ja": "{l}で{g}関数を書いてください。|{g}{l}のコード例を示し、説明してください。",
}  # fmt: skip
_GOALS = {
    "de": "eine Liste sortiert|Wörter zählt|Primzahlen findet|eine Zeichenkette umkehrt|eine Datei einliest|Duplikate entfernt|den Durchschnitt berechnet|eine E-Mail-Adresse prüft",
    "fr": "trie une liste|compte les mots|trouve les nombres premiers|inverse une chaîne|lit un fichier|supprime les doublons|calcule la moyenne|valide une adresse e-mail",
    "es": "ordene una lista|cuente palabras|encuentre números primos|invierta una cadena|lea un archivo|elimine duplicados|calcule el promedio|valide un correo",
    "ru": "сортирует список|считает слова|находит простые числа|переворачивает строку|читает файл|удаляет дубликаты|вычисляет среднее|проверяет адрес почты",
    "zh": "对列表排序|统计单词数|找出质数|反转字符串|读取文件|删除重复项|计算平均值|验证邮箱地址",
    "ja": "リストを並べ替える|単語を数える|素数を見つける|文字列を反転する|ファイルを読み込む|重複を取り除く|平均を計算する|メールアドレスを検証する",
}  # fmt: skip
_TO_ENGLISH = {
    "de": "Übersetze ins Englische: {s}",
    "fr": "Traduis en anglais : {s}",
    "es": "Traduce al inglés: {s}",
    "ru": "Переведи на английский: {s}",
    "zh": "翻译成英文:{s}",
    "ja": "英語に訳してください:{s}",
}
_SENTENCES = {
    "de": "Der Laden schließt heute um {a} Uhr.|Ich habe {b} Bücher bestellt, aber nur eines ist angekommen.|Kannst du {n} sagen, dass wir später kommen?|Wir treffen uns am Bahnhof, wenn der Regen aufhört.",
    "fr": "Le magasin ferme aujourd'hui à {a} heures.|J'ai commandé {b} livres, mais un seul est arrivé.|Peux-tu dire à {n} que nous serons en retard ?|On se retrouve à la gare quand la pluie s'arrête.",
    "es": "La tienda cierra hoy a las {a}.|Pedí {b} libros, pero solo llegó uno.|¿Puedes decirle a {n} que llegaremos tarde?|Nos vemos en la estación cuando deje de llover.",
    "ru": "Магазин сегодня закрывается в {a} часов.|Я заказал {b} книг, но пришла только одна.|Скажи, пожалуйста, что мы опоздаем.|Встретимся на вокзале, когда закончится дождь.",
    "zh": "商店今天{a}点关门。|我订了{b}本书,但只到了一本。|请告诉他我们会晚到。|雨停了我们就在车站见面。",
    "ja": "店は今日{a}時に閉まります。|本を{b}冊注文しましたが、一冊しか届きませんでした。|遅れると伝えてください。|雨がやんだら駅で会いましょう。",
}  # fmt: skip
_PROGRAMMING = ("Python", "Python", "JavaScript", "Java", "C++", "Go", "Rust", "SQL")
SHARES = {"zh": 0.28, "de": 0.18, "es": 0.16, "fr": 0.16, "ru": 0.11, "ja": 0.11}


def other_languages(r: random.Random) -> str:
    """A prompt in one of six languages."""
    language = r.choices(list(SHARES), list(SHARES.values()))[0]

    def one(words: dict[str, str]) -> str:
        return r.choice(words[language].split("|"))

    kind = r.choices([_TALK, _SUMS, _CODE, _TO_ENGLISH], [6, 2, 2, 1])[0]
    values = {"a": r.randint(2, 9), "b": r.randint(2, 12), "c": r.randint(110, 400), "n": r.choice(NAMES)}  # fmt: skip
    return one(kind).format(
        t=one(_TOPICS), u=one(_TOPICS), l=r.choice(_PROGRAMMING), g=one(_GOALS),
        s=one(_SENTENCES).format(**values), **values,
    )  # fmt: skip
